"""Checkpoints that are whole or not there, and a `last` one however a run ends."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from unet3d.whole import whole


class WholeCheckpoints(TorchCheckpointIO):
    """Writes beside the target and moves it there once the disk has it.

    Lightning's own way goes through $TMPDIR without fsync, and a kill left an empty `last.ckpt`.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole(target) as draft, draft.open("wb") as file:
            torch.save(checkpoint, file)


def amended(path: Path, facts: dict[str, Any]) -> None:
    """Add to what a checkpoint says of its network."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    content["unet3d"] |= facts
    WholeCheckpoints().save_checkpoint(content, path)


class LastCheckpoint(Callback):
    """Keeps `last.ckpt`: at the end of an epoch, but not more often than `every_seconds`, and at
    the end of the run, be it done, stopped or broken.
    """

    def __init__(self, folder: Path, every_seconds: float = 60):
        self.path = folder / "last.ckpt"
        self.every_seconds = every_seconds
        self.saved_at = time.monotonic()
        self.saved_step = -1

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if time.monotonic() - self.saved_at >= self.every_seconds:
            self._save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if trainer.training and trainer.global_step > 0:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if trainer.global_step != self.saved_step:
            trainer.save_checkpoint(self.path)
            self.saved_at, self.saved_step = time.monotonic(), trainer.global_step


def best_checkpoint(folder: Path) -> ModelCheckpoint:
    """Keeps `best.ckpt`, by the mean validation Dice."""
    return ModelCheckpoint(
        folder,
        filename="best",
        monitor="val/dice",
        mode="max",
        auto_insert_metric_name=False,
        enable_version_counter=False,
        save_on_train_epoch_end=False,  # but after a validation
    )
