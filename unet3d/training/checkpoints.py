"""Checkpoints of a run: last.ckpt, previous.ckpt and best.ckpt."""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from unet3d.checkpoint_file import PREVIOUS, load_checkpoint, save_checkpoint
from unet3d.errors import describe_os_error
from unet3d.training.lightning_internals import is_optimizer_step
from unet3d.training.loggers import warn

LAST = "last.ckpt"
BEST = "best.ckpt"

MAX_TIME_FRACTION = 0.01
"""Largest fraction of a run's time that may go into saving `last.ckpt`."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Save checkpoints atomically, keep the one before last.ckpt, and survive a full disk.

    Lightning's own plugin goes through $TMPDIR without fsync: with $TMPDIR on another file system,
    a kill left an empty last.ckpt and no other. A checkpoint that cannot be written costs a
    warning: the next save tries again, and the previous checkpoint stays intact.
    """

    def __init__(self) -> None:
        self.failed_saves: dict[str, str] = {}  # checkpoint name: why its last save failed

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        path = Path(path)

        def save() -> None:
            if path.name == LAST and path.exists():
                replace_with_copy(path, path.with_name(PREVIOUS))
            save_checkpoint(checkpoint, path)

        self._try(path, save)

    def copy_checkpoint(self, path: Path, target: Path) -> None:
        """Replace another checkpoint by one that was saved."""
        self._try(target, lambda: replace_with_copy(path, target))

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Load the checkpoint to resume."""
        return load_checkpoint(Path(path), mmap=False)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove one that is no longer among the best; the next validation tries again."""
        with suppress(OSError):
            Path(path).unlink(missing_ok=True)

    def _try(self, path: Path, write: Callable[[], None]) -> None:
        """Write a checkpoint; warn once if that fails, and note why."""
        try:
            write()
        except OSError as error:
            kept = "keeping the previous checkpoint" if path.exists() else "no previous checkpoint"
            message = f"{describe_os_error(error, path)}; {kept}"
            if path.name not in self.failed_saves:
                warn(f"{message}; training continues")
            self.failed_saves[path.name] = message
        else:
            self.failed_saves.pop(path.name, None)


class RunCheckpoint(ModelCheckpoint):
    """Save a checkpoint after the metrics before it, which a resumed run does not log again."""

    @property
    def state_key(self) -> str:
        """Return the name of its state in a checkpoint, which no option changes."""
        return type(self).__qualname__

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        for logger in trainer.loggers:
            logger.save()
        super()._save_checkpoint(trainer, filepath)


class LastCheckpoint(RunCheckpoint):
    """Save last.ckpt between two optimizer steps, `every_seconds` apart, and when the run ends.

    Lightning's callback saves before a step is logged, also between micro-batches, whose gradients
    are not in a checkpoint, and not at the end of the run. The interval grows where saving takes
    long.
    """

    def __init__(self, folder: Path, every_seconds: float):
        super().__init__(
            folder,
            "last",
            train_time_interval=timedelta(seconds=every_seconds),
            save_on_train_epoch_end=False,
            save_on_exception=True,
            enable_version_counter=False,
        )
        self.every_seconds = every_seconds

    @property
    def saved_step(self) -> int:
        """Return the optimizer step of the last save in this process; 0 if there was none."""
        return self._last_global_step_saved

    def save(self, trainer: pl.Trainer) -> None:
        """Save the current state of the run."""
        self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        start = time.monotonic()
        super()._save_checkpoint(trainer, filepath)
        if self.every_seconds:
            seconds = (time.monotonic() - start) / MAX_TIME_FRACTION
            self._train_time_interval = timedelta(seconds=max(self.every_seconds, seconds))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, pl_module, None, batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        """Wait until the step is logged."""

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer)

    def _should_save_on_exception(self, trainer: pl.Trainer) -> bool:
        """Return whether a run could resume here: a rank cannot save alone, nor within a step."""
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        is_logged = trainer.training and batches.processed == batches.completed
        return (
            is_logged
            and is_optimizer_step(trainer)
            and trainer.world_size == 1
            and super()._should_save_on_exception(trainer)
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class BestCheckpoint(RunCheckpoint):
    """Save best.ckpt after the validation with the best value of a metric.

    With `top_k` above 1, also keep the `top_k` best ones as best-step=STEP.ckpt. Lightning's
    callback saves a first value that is NaN, and forgets the best one when a folder is moved.
    """

    def __init__(
        self,
        folder: Path,
        *,
        monitor: str = "val/dice",
        mode: Literal["max", "min"] = "max",
        top_k: int = 1,
    ):
        super().__init__(
            folder,
            "best" if top_k == 1 else "best-step={step:06d}",
            monitor=monitor,
            mode=mode,
            save_top_k=top_k,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self.folder = folder

    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        """Return whether a value is among the best ones; NaN is not."""
        is_known = current is not None and not bool(torch.isnan(current))
        return is_known and super().check_monitor_top_k(trainer, current)

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        is_best = filepath == self.best_model_path
        if is_best and Path(filepath).name != BEST and trainer.is_global_zero:
            io = trainer.strategy.checkpoint_io
            assert isinstance(io, AtomicCheckpointIO)
            io.copy_checkpoint(Path(filepath), self.folder / BEST)

    def state_dict(self) -> dict[str, Any]:
        """Return the score of each file, by its name in the folder."""
        return {"scores": {Path(path).name: float(v) for path, v in self.best_k_models.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        scores = {
            str(path): torch.tensor(value)
            for name, value in state_dict["scores"].items()
            if (path := Path(self.dirpath or self.folder, name)).exists()
        }
        if not scores:
            return
        best, worst = (max, min) if self.mode == "max" else (min, max)
        self.best_k_models = scores
        self.best_model_path = best(scores, key=scores.__getitem__)
        self.best_model_score = scores[self.best_model_path]
        if len(scores) == self.save_top_k:
            self.kth_best_model_path = worst(scores, key=scores.__getitem__)
            self.kth_value = scores[self.kth_best_model_path]


def replace_with_copy(path: Path, target: Path) -> None:
    """Replace `target` by a hard link to `path`, or a copy; `path` exists at any time."""
    link = target.with_name(f".{os.getpid()}-{target.name}")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(path, link)
    link.replace(target)
    link.unlink(missing_ok=True)  # replace() keeps it if both are already the same file


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of killed runs."""
    for draft in folder.glob(".[0-9]*-*.ckpt"):
        draft.unlink(missing_ok=True)
