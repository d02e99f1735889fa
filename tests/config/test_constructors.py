"""Building and calling what a config or a checkpoint may name has no side effect."""

import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from hydra.utils import get_object

from unet3d.config.constructors import CONFIGURED, NETWORKS

DOWNLOADS = {"pretrained", "weights", "progress", "pretrained_path", "weights_path", "cache_dir"}


def build_all(folder, *more):
    """Build and call every class in a process of its own; return a line for each one that acts."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.config.helpers.build_constructors", *more],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    *lines, count = ended.stdout.splitlines() or [""]
    assert count.isdigit(), ended.stderr
    assert int(count) == sum(map(len, CONFIGURED.values())) + 1 + len(more)
    return lines


def test_no_class_that_a_config_may_name_acts_when_it_is_built_or_called(tmp_path):
    probes = [f"tests.config.helpers.acting.{name}" for name in ("Writer", "WritingModule")]
    lines = build_all(tmp_path, *probes)
    assert {line.partition(" | writes ")[0] for line in lines} == set(probes)


@pytest.mark.parametrize("package", CONFIGURED)
def test_no_class_takes_an_argument_that_makes_it_download(package):
    for name in CONFIGURED[package]:
        taken = signature(get_object(f"{package}.{name}")).parameters
        assert not DOWNLOADS & taken.keys(), name


def test_a_checkpoint_may_name_nothing_that_a_config_may_not():
    for package, names in NETWORKS.items():
        assert names <= CONFIGURED[package]
