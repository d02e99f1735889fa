"""Fixtures of all tests: settings of a small run, one thread, one seed."""

import gc
import os
import pickle
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra._internal import config_loader_impl as hydra_loader
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, Overrides
from hypothesis import settings
from omegaconf import DictConfig

from unet3d.config.compose import compose_config
from unet3d.data.layouts.synthetic import Synthetic
from unet3d.training.config import TrainConfig, parse_train_config

Compose = Callable[..., TrainConfig]


COLLECTED: Counter[str] = Counter()
"""Number of collected items by file."""

settings.register_profile("untimed", deadline=None)  # a busy machine fails no test
settings.load_profile("untimed")

gc.disable()  # until all tests are imported: it takes half of the time of collecting them


@pytest.hookimpl(tryfirst=True)  # before some are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]):
    COLLECTED.update(item.nodeid.partition("::")[0] for item in items)


def pytest_collection_finish():
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # torch and OmegaConf make many objects: 4 % of the time


def pytest_unconfigure():
    gc.unfreeze()


def pytest_configure():
    """Let tests send signals that shells and nohup let what they start ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


os.environ["OMP_NUM_THREADS"] = "1"  # for subprocesses: more threads would wait for each other
for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
    os.environ.pop(variable, None)
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:2:16:8"  # torch's own; importing MONAI changes it


@pytest.fixture(scope="session", autouse=True)
def compose_once():
    """Let Hydra list and merge the same files once: it took a quarter of the tests' time."""
    create = hydra_loader.create_defaults_list
    merge = ConfigLoaderImpl._compose_config_from_defaults_list
    lists: dict[str, DefaultsList] = {}  # kept, so that each list has its own id
    merged: dict[int, bytes] = {}  # pickled: the collector visits no objects of theirs

    def create_or_reuse(
        repo: Any, config_name: str, overrides_list: list[Any], **options: bool
    ) -> DefaultsList:
        folders = [Path(s.path) for s in repo.get_sources() if s.scheme() == "file"]
        files = [(f, f.stat().st_mtime_ns) for folder in folders for f in folder.rglob("*.yaml")]
        given = Overrides(repo=repo, overrides_list=overrides_list)
        groups = (given.override_choices, given.append_group_defaults, given.deletions)
        key = str((config_name, groups, options, files))
        if key not in lists:
            lists[key] = create(repo, config_name, overrides_list, **options)
        return replace(lists[key], config_overrides=given.config_overrides)

    def merge_or_copy(loader: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> DictConfig:
        if id(defaults) not in merged:
            merged[id(defaults)] = pickle.dumps(merge(loader, defaults, repo))
        return pickle.loads(merged[id(defaults)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydra_loader, "create_defaults_list", create_or_reuse)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_or_copy)
        yield


@pytest.fixture(autouse=True)
def seeded():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return overrides that make a run tiny; all tests of a process share its volumes."""
    folder = tmp_path_factory.mktemp("small")
    return [
        f"data.root={folder / 'synthetic'}",
        f"data.cache={folder / 'preprocessed'}",
        "data.layout.size=[16,16,16]",
        "data.layout.num_cases=5",
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
    """Compose and parse train.yaml with overrides, as `unet3d train` does."""

    def compose_settings(*overrides: str, base: Sequence[str] = small) -> TrainConfig:
        return parse_train_config(compose_config([*base, *overrides], "train"))

    return compose_settings


@pytest.fixture(scope="session")
def decathlon_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small dataset in the layout of the Decathlon."""
    folder = tmp_path_factory.mktemp("decathlon")
    sizes: Any = {"num_classes": 3, "num_cases": 5, "size": [16, 16, 16]}
    dataset = Synthetic("", **sizes, spacing_mm=[1.0, 1.0, 2.0], noise=0.1, seed=1)
    dataset.write(folder)
    (folder / "imagesTs").mkdir()
    for n, file in enumerate(sorted((folder / "imagesTr").iterdir())):
        (folder / "imagesTs" / f"hippocampus_{n:03d}.nii.gz").symlink_to(file)
    return folder


@pytest.fixture
def unet3d(tmp_path: Path, small: list[str], monkeypatch: pytest.MonkeyPatch):
    """Run `unet3d train` on small volumes in an empty working folder; return the exit code."""
    from unet3d.__main__ import main

    monkeypatch.chdir(tmp_path)

    def command(*overrides: str) -> int:
        return main(["train", *small, f"hydra.run.dir={tmp_path / 'run'}", *overrides])

    return command
