"""Shared by all tests: a composed config on small volumes, one thread, one seed."""

import gc
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
import yaml

from tests.data.helpers.folders import nnunet, pairs
from unet3d.config.compose import ComposedConfig
from unet3d.config.compose import compose_config as request_of_words
from unet3d.data.layouts.synthetic import write_dataset

Compose = Callable[..., ComposedConfig]


gc.disable()  # until all is imported: half of the time of collecting


def pytest_collection_finish():
    gc.enable()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


os.environ["OMP_NUM_THREADS"] = "1"  # of what tests start: more would wait for each other


@pytest.fixture(scope="session", autouse=True)
def read_once():
    """Hydra reads the same YAML files for every config: that is two fifths of composing one."""
    parse, known = yaml.load, {}

    def load(stream: TextIO | str, Loader: type) -> Any:
        text = stream if isinstance(stream, str) else stream.read()
        if text not in known:
            known[text] = parse(text, Loader)
        return deepcopy(known[text])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "load", load)
        yield


@pytest.fixture(autouse=True)
def seeded():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that make a run tiny; the volumes are shared by all tests of a process."""
    folder = tmp_path_factory.mktemp("small")
    return [
        f"data.root={folder / 'synthetic'}",
        f"data.cache={folder / 'prepared'}",
        "data.source.size=[16,16,16]",
        "data.source.num_cases=5",
        "data.patch_size=[16,16,16]",
        "data.batch_size=2",
        "data.patches_per_case=1",
        "trainer.max_steps=1",
        "trainer.enable_progress_bar=false",
        "trainer.accelerator=cpu",
        "memory.estimate=false",
        "evaluation.enabled=false",
    ]


@pytest.fixture
def composed(small: list[str]) -> Compose:
    """Compose train.yaml as the command line would."""

    def request(*overrides: str, base: Sequence[str] = small) -> ComposedConfig:
        return request_of_words([*base, *overrides], "train")

    return request


@pytest.fixture(scope="session")
def decathlon_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set in the Decathlon's layout, as if it had been downloaded."""
    folder = tmp_path_factory.mktemp("decathlon")
    write_dataset(
        folder, classes=3, cases=5, size=[16, 16, 16], spacing_mm=[1.0, 1.0, 2.0], noise=0.1, seed=1
    )
    (folder / "imagesTs").symlink_to(folder / "imagesTr")
    return folder


@pytest.fixture(scope="session")
def data_options(tmp_path_factory: pytest.TempPathFactory, decathlon_folder: Path):
    """What each data set that lies on disk needs, beside data=<option>."""
    return {
        "decathlon": [f"data.root={decathlon_folder}"],
        "nnunet": [f"data.root={nnunet(tmp_path_factory.mktemp('nnunet'), 5)}"],
        "pairs": [f"data.root={pairs(tmp_path_factory.mktemp('pairs'), 5)}", "data.num_classes=3"],
    }


@pytest.fixture
def unet3d(tmp_path: Path, small: list[str], monkeypatch: pytest.MonkeyPatch):
    """Run `unet3d train` in an empty working folder, on small volumes; return the exit code."""
    from unet3d.cli.main import main

    monkeypatch.chdir(tmp_path)

    def command(*overrides: str) -> int:
        return main(["train", *small, f"hydra.run.dir={tmp_path / 'run'}", *overrides])

    return command


@pytest.fixture(scope="session")
def drivers(tmp_path_factory) -> dict[str, str]:
    """Libraries that answer as NVIDIA's would: a new one, an old one, one that does not start."""
    folder, source = tmp_path_factory.mktemp("driver"), Path(__file__).with_name("driver.cpp")
    made = {kind: str(folder / f"{kind}.so") for kind in ("new", "old", "broken")}
    for kind, path in made.items():
        command = ["g++", "-shared", "-fPIC", f"-D{kind.upper()}", str(source), "-o", path]
        subprocess.run(command, check=True)
    return made


@pytest.fixture
def driver(drivers, monkeypatch) -> Iterator[Callable[[str], None]]:
    """Let NVIDIA's driver be another for a while: new, old, broken, or any library."""
    from unet3d import nvml

    def forget():
        nvml._library.cache_clear()
        nvml._known.cache_clear()

    def chosen(kind: str) -> None:
        monkeypatch.setattr(nvml, "LIBRARY", drivers.get(kind, kind))
        forget()

    yield chosen
    forget()
