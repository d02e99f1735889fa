"""Checkpoints that are whole or not there: the `last` one, the one before it, and the `best`."""

import os
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO

from unet3d.atomic_write import atomic_write

SHARE = 0.01
"""Of a run's time may go into writing `last.ckpt` again and again."""

PREVIOUS = "previous.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and moves it there once the disk has it.

    Lightning's own way goes through $TMPDIR without fsync, and a kill left an empty `last.ckpt`.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as draft, draft.open("wb") as file:
            torch.save(checkpoint, file)


def update_metadata(path: Path, facts: dict[str, Any]) -> None:
    """Add to what a checkpoint says of its network."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    content["unet3d"] |= facts
    AtomicCheckpointIO().save_checkpoint(content, path)


def find_corruption(path: Path) -> str | None:
    """Why a file is not the checkpoint that was written, by the checksum of each part; or None."""
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as parts:
                bad = parts.testzip()
        except Exception as error:  # whatever a flipped bit makes of a header
            return f"it is not a whole checkpoint ({error})"
    return None if bad is None else f"the checksum of its part {bad} is wrong"


class LastCheckpoint(Callback):
    """Keeps `last.ckpt`, and as `previous.ckpt` the one before it.

    It is written between two steps, at most every so many seconds; and as a run ends, be it done,
    stopped or broken. Only the first rank writes, and the others need not know.
    """

    def __init__(self, folder: Path, every_seconds: float):
        self.path = folder / "last.ckpt"
        self.every_seconds = every_seconds
        self.saved_at = time.monotonic()
        self.took = 0.0
        self.saved_step = -1

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.saved_at = time.monotonic()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches:
            return  # gradients are not in a checkpoint
        if time.monotonic() - self.saved_at >= self._pause():
            self.save(trainer)

    def _pause(self) -> float:
        return max(self.every_seconds, self.took / SHARE) if self.every_seconds else 0.0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.save(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        # Between a step and its place in the curves a run is nowhere that it could go on from.
        whole = batches.processed == batches.completed
        if trainer.training and whole and trainer.global_step > max(self.saved_step, 0):
            self.save(trainer)

    def save(self, trainer: pl.Trainer) -> None:
        """Write the state of the run as it is."""
        begun = time.monotonic()
        if trainer.is_global_zero:
            if self.path.exists():
                replace_with_copy(self.path, self.path.with_name(PREVIOUS))
            write_checkpoint(trainer, self.path)
        self.saved_at = time.monotonic()
        self.took, self.saved_step = self.saved_at - begun, trainer.global_step


class BestCheckpoint(Callback):
    """Keeps `best.ckpt`: after the validation with the highest mean Dice."""

    def __init__(self, folder: Path):
        self.path = folder / "best.ckpt"
        self.best: float | None = None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        dice = float(trainer.callback_metrics.get("val/dice", torch.nan))
        if trainer.sanity_checking or not (self.best is None or dice > self.best):
            return
        self.best = dice
        if trainer.is_global_zero:
            write_checkpoint(trainer, self.path)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]


def write_checkpoint(trainer: pl.Trainer, path: Path) -> None:
    """All that a run needs to go on; what was logged until now is on the disk as well."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.flush()
    content = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    trainer.strategy.checkpoint_io.save_checkpoint(content, path)


def replace_with_copy(path: Path, target: Path) -> None:
    """Let `target` be the file that `path` is now; there is a file at `path` all the while."""
    link = path.with_name(f".{os.getpid()}-{target.name}")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a filesystem without hard links
        shutil.copyfile(path, link)
    link.replace(target)
    link.unlink(missing_ok=True)  # it stays if both were one file already


def remove_leftovers(folder: Path) -> None:
    """Delete the drafts that killed runs have left."""
    for draft in folder.glob(".[0-9]*-*.ckpt"):
        draft.unlink(missing_ok=True)
