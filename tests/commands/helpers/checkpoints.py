"""Checkpoints as a run leaves them, of networks that were never trained."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from unet3d.commands.train import build_training
from unet3d.config.compose import compose_config
from unet3d.training.config import parse_train_config


def checkpoints(folder: Path, words: Sequence[str]) -> Callable[..., Path]:
    """Return a function that makes one by name, once; `metadata` replaces parts of its metadata."""

    def make_checkpoint(name: str, *overrides: str, **metadata) -> Path:
        path = folder / name / "checkpoints" / "last.ckpt"
        if not path.exists():
            path.parent.mkdir(parents=True)
            anything = "model.prior_bias=false"  # with a prior all of it would be background
            run = build_training(
                parse_train_config(compose_config([*words, anything, *overrides], "train")),
                folder / name,
            )
            content = {
                "state_dict": run.module.state_dict(),
                "unet3d": run.module.metadata | metadata,
            }
            torch.save(content, path)
        return path

    return make_checkpoint
