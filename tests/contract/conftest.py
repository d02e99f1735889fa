"""What must survive every change of the inside: commands, the public Python API, and files.

Nothing below `unet3d` and `python -m unet3d` is imported here.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Run:
    """The folder of a run that has ended, and what the run printed."""

    folder: Path
    out: str

    @property
    def best(self) -> Path:
        return self.folder / "checkpoints" / "best.ckpt"

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"


def call(*arguments: str) -> Ended:
    """Run `unet3d ARGUMENTS` in this process."""
    from unet3d.__main__ import main

    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Ended(code, out.getvalue(), err.getvalue())


@pytest.fixture
def unet3d(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run a command in this process, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    return call


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start `python -m unet3d ARGUMENTS` as a process of its own, in an empty working folder."""
    processes: list[subprocess.Popen] = []

    def start_process(*arguments: str, **options) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "unet3d", *map(str, arguments)],
                cwd=options.pop("cwd", tmp_path),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                **options,
            )
        )
        return processes[-1]

    yield start_process
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return overrides that make a run tiny: generated volumes that all tests share."""
    folder = tmp_path_factory.mktemp("contract")
    return [
        f"data.root={folder / 'synthetic'}",
        f"data.cache={folder / 'preprocessed'}",
        "data.layout.size=[16,16,16]",
        "data.layout.num_cases=5",
        "data.patch_size=[16,16,16]",
        "data.batch_size=2",
        "data.patches_per_case=1",
        "data.num_workers=0",
        "trainer.max_steps=1",
        "trainer.enable_progress_bar=false",
        "trainer.accelerator=cpu",
        "memory.estimate=false",
        "evaluation.enabled=false",
    ]


@contextmanager
def working_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Run:
    """Train once for a few steps, with the evaluation; all tests of a process share the run."""
    folder = tmp_path_factory.mktemp("trained")
    torch.set_num_threads(1)
    with working_folder(folder):
        ended = call(
            "train",
            *small,
            "trainer.max_steps=6",
            "evaluation.enabled=true",
            "memory.estimate=true",
            "logger=[tensorboard,csv]",
            f"hydra.run.dir={folder / 'run'}",
        )
    assert ended.code == 0, ended.err
    return Run(folder / "run", ended.out)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def train(unet3d: Callable[..., Ended], small: list[str]) -> Callable[..., Ended]:
    """Train on small volumes, in the folder `run` of the working folder."""

    def train_small(*options: str) -> Ended:
        return unet3d("train", *small, "hydra.run.dir=run", *options)

    return train_small
