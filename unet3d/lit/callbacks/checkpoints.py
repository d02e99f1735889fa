"""Checkpoints of a run, saved atomically: last.ckpt, previous.ckpt and best.ckpt."""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO

from unet3d.atomic_write import name_file
from unet3d.checkpoint_file import PREVIOUS, load_checkpoint, save_checkpoint
from unet3d.errors import UsageError
from unet3d.lit.lightning_internals import dump_checkpoint
from unet3d.lit.loggers.run_logger import list_run_loggers
from unet3d.lit.validation_metric import ValidationMetric

MAX_TIME_FRACTION = 0.01
"""Largest fraction of a run's time that may go into saving `last.ckpt`."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Save checkpoints atomically.

    Lightning's own plugin goes through $TMPDIR without fsync; a kill left an empty `last.ckpt`.
    `check` refuses a checkpoint that a run cannot resume.
    """

    check: Callable[[Path, dict[str, Any]], None] = staticmethod(lambda path, content: None)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        save_checkpoint(checkpoint, Path(path))

    def copy_checkpoint(self, path: Path, target: Path) -> None:
        """Replace another checkpoint by one that was saved."""
        replace_with_copy(path, target)

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Load the checkpoint to resume; what is restored is what is checked here."""
        content = load_checkpoint(Path(path), mmap=False)
        self.check(Path(path), content)
        return content


class LastCheckpoint(Callback):
    """Save `last.ckpt` and keep the checkpoint before it as `previous.ckpt`.

    Saves between two optimizer steps, `every_seconds` apart or more, and when the run ends, even
    with an error. Only rank 0 writes; the others do not wait for it.
    """

    def __init__(self, folder: Path, every_seconds: float):
        self.path = folder / "last.ckpt"
        self.every_seconds = every_seconds
        self.saved_at = time.monotonic()
        self.save_seconds = 0.0
        self.saved_step = -1

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.saved_at = time.monotonic()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches:
            return  # gradients are not in a checkpoint
        if time.monotonic() - self.saved_at >= self._interval_seconds():
            self.save(trainer)

    def _interval_seconds(self) -> float:
        if not self.every_seconds:
            return 0.0
        return max(self.every_seconds, self.save_seconds / MAX_TIME_FRACTION)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.save(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        # A run cannot resume from a step that has not been logged yet.
        between_steps = batches.processed == batches.completed
        if trainer.training and between_steps and trainer.global_step > max(self.saved_step, 0):
            self.save(trainer)

    def save(self, trainer: pl.Trainer) -> None:
        """Save the current state of the run."""
        start = time.monotonic()
        if trainer.is_global_zero:
            if self.path.exists():
                copy_checkpoint(trainer, self.path, self.path.with_name(PREVIOUS))
            write_checkpoint(trainer, self.path)
        self.saved_at = time.monotonic()
        self.save_seconds, self.saved_step = self.saved_at - start, trainer.global_step


class BestCheckpoint(Callback):
    """Save `best.ckpt` after the validation with the best value of a metric.

    With `top_k` above 1, also keep the `top_k` best ones as best-step=STEP.ckpt.
    """

    def __init__(
        self,
        folder: Path,
        *,
        monitor: str = "val/dice",
        mode: Literal["max", "min"] = "max",
        top_k: int = 1,
    ):
        if top_k < 1:
            raise UsageError(f"callbacks.best_checkpoint.top_k is at least 1, got {top_k}")
        self.folder, self.path, self.top_k = folder, folder / "best.ckpt", top_k
        self.metric = ValidationMetric(monitor, mode)
        self.best: float | None = None
        self.ranking: list[tuple[float, int]] = []  # (value, step), best first

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value, step = self.metric.read(trainer), trainer.global_step
        is_best = self.metric.is_better(value, self.best)
        rank = sum(not self.metric.is_better(value, other) for other, _ in self.ranking)
        if value != value or not (is_best or rank < self.top_k):
            return
        if is_best:
            self.best = value
        self.ranking = [*self.ranking[:rank], (value, step), *self.ranking[rank:]][: self.top_k]
        if not trainer.is_global_zero:
            return
        if self.top_k == 1:
            write_checkpoint(trainer, self.path)
            return
        path = self._get_path(step)
        write_checkpoint(trainer, path)
        if is_best and path.exists():
            copy_checkpoint(trainer, path, self.path)
        kept = {self._get_path(step) for _, step in self.ranking}
        for other in self.folder.glob("best-step=*.ckpt"):
            if other not in kept:
                with suppress(OSError):  # the next validation tries again
                    other.unlink()

    def copy_from(self, source: Path, state: Mapping[str, Any]) -> list[str]:
        """Copy the best checkpoints of a run in another folder; return what to print about it."""
        steps = [step for _, step in state.get("ranking", [])]
        if not steps or source.resolve() == self.folder.resolve():
            return []
        self.folder.mkdir(parents=True, exist_ok=True)
        best = source / self.path.name
        try:
            step = load_checkpoint(best).get("global_step")
        except UsageError:  # missing or corrupted
            step = None
        if step != steps[0]:
            return [f"{best} is not of step {steps[0]}: no best.ckpt until one is better"]
        for path in (best, *(source / self._get_path(step).name for step in steps)):
            if path.exists():
                replace_with_copy(path, self.folder / path.name)
        return []

    def _get_path(self, step: int) -> Path:
        return self.folder / f"best-step={step:06d}.ckpt"

    STATE = (  # the second one of runs without a ranking
        {"best": float | None, "ranking": list[tuple[float, int]]},
        {"best": float | None},
    )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "ranking": self.ranking}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
        before = [] if self.best is None else [(self.best, 0)]  # of a run without a ranking
        self.ranking = [(value, step) for value, step in state_dict.get("ranking", before)]


def write_checkpoint(trainer: pl.Trainer, path: Path) -> None:
    """Save the full training state, and flush the metrics that were logged before it."""
    for logger in list_run_loggers(trainer):
        logger.flush()
    trainer.strategy.checkpoint_io.save_checkpoint(dump_checkpoint(trainer), path)


def copy_checkpoint(trainer: pl.Trainer, path: Path, target: Path) -> None:
    """Replace a checkpoint of a run by a copy of another."""
    io = trainer.strategy.checkpoint_io
    copy = io.copy_checkpoint if isinstance(io, AtomicCheckpointIO) else replace_with_copy
    copy(path, target)


def replace_with_copy(path: Path, target: Path) -> None:
    """Replace `target` by a hard link to `path`, or a copy; `path` exists at any time."""
    link = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        link.unlink(missing_ok=True)
        try:
            os.link(path, link)
        except OSError:  # another filesystem, or one without hard links
            with name_file(target):
                shutil.copyfile(path, link)
        link.replace(target)
    finally:
        with suppress(OSError):
            link.unlink(missing_ok=True)  # replace() keeps it if both are already the same file


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of killed runs."""
    for draft in folder.glob(".[0-9]*-*.ckpt"):
        with suppress(OSError):
            draft.unlink()
