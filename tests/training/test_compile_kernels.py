"""The kernels of a step are compiled before the first step."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unet3d.machine import Precision
from unet3d.memory.step.build import build_network
from unet3d.training import preflight
from unet3d.training.preflight import prepare_kernels


@pytest.mark.long
def test_after_compiling_a_steps_kernels_in_parallel_none_is_left(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.training.helpers.compile_step"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def prepare(composed):
    """Prepare the kernels of a run; return what is printed."""
    settings = composed("data.num_classes=3", "data.in_channels=1")
    network = build_network(settings.step)
    settings.step.checkpointing().apply(network)

    def run(device):
        lines, data = [], SimpleNamespace(settings=settings, device=torch.device(device))
        prepare_kernels(data, Precision("16", "16"), network, lines.append)
        return lines

    return run


def test_a_run_compiles_before_it_trains_or_in_its_first_step_and_says_so(prepare, monkeypatch):
    received = []
    monkeypatch.setattr(
        preflight, "compile_kernels", lambda found, *_, **__: received.extend(found)
    )
    assert not prepare("cpu")
    assert prepare("cuda") == ["preparing GPU kernels"]
    assert len(received) > 20

    def fail(make_step):
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(preflight, "list_launches", fail)
    assert prepare("cuda") == ["GPU kernels are compiled in the first step: data-dependent"]
