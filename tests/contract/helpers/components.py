"""Build the objects that a config names by `_target_`, as users do for components of their own."""

from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tests.contract.conftest import call


def compose(*overrides: str) -> DictConfig:
    """Return the config of `unet3d train OVERRIDES`, as `--cfg job` prints it."""
    ended = call("train", *overrides, "--cfg", "job")
    assert ended.code == 0, ended.err
    return OmegaConf.create(ended.out)


def build(group: str, *overrides: str) -> Any:
    """Build the object of a config group."""
    return instantiate(compose(*overrides)[group])


def rewrite_checkpoint(source: Path, target: Path, change) -> Path:
    """Save a checkpoint again after a change of its content."""
    content = torch.load(source, weights_only=True, map_location="cpu")
    change(content)
    torch.save(content, target)
    return target


def saved_bytes(action) -> tuple[Any, int]:
    """Return what an action returns, and the bytes that autograd saves for its backward."""
    storages: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = action()
    return result, sum(storages.values())
