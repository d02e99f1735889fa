"""When and how a run saves: last.ckpt between steps and at its end, best.ckpt after validations."""

import time
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from unet3d.checkpoint_file import BEST, LAST, PREVIOUS, load_checkpoint, save_checkpoint
from unet3d.errors import describe_os_error
from unet3d.files import replace_with_copy
from unet3d.training.callbacks.stopping import check_mode
from unet3d.training.distributed import RankAgreement
from unet3d.training.lightning_internals import is_optimizer_step
from unet3d.training.loggers import warn

MAX_TIME_FRACTION = 0.01  # largest fraction of a run's time that may go into saving `last.ckpt`


class LastCheckpoint(Checkpoint):
    """Save last.ckpt between two optimizer steps, `every_seconds` apart.

    RunCallbacks saves it when the run ends, before other callbacks do what they do then.
    Lightning's callback saves before a step is logged, also between micro-batches, whose gradients
    are not in a checkpoint, and not at the end of the run. The interval grows where saving takes
    long.
    """

    def __init__(self, folder: Path, ranks: RankAgreement, every_seconds: float):
        self.path, self.every_seconds = folder / LAST, every_seconds
        self.saved_step = 0  # optimizer step of the last save in this process
        self.due = inf  # time of the next save
        self.is_due = ranks.share(lambda: time.monotonic() >= self.due)

    def save(self, trainer: Trainer) -> None:
        """Save the current state of the run, after the metrics before it."""
        start = time.monotonic()
        save_logs(trainer)
        trainer.save_checkpoint(self.path)
        self.saved_step, interval = trainer.global_step, self.every_seconds
        if interval:
            interval = max(interval, (time.monotonic() - start) / MAX_TIME_FRACTION)
        self.due = start + interval

    def on_train_start(self, *_: Any) -> None:
        self.due = time.monotonic() + self.every_seconds

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches or trainer.global_step == self.saved_step:
            return
        if self.is_due():
            self.save(trainer)

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        """Save if a run can be resumed here: a rank cannot save alone, nor within a step."""
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        is_logged = trainer.training and batches.processed == batches.completed
        is_between_steps = is_logged and is_optimizer_step(trainer)
        if is_between_steps and trainer.world_size == 1 and trainer.global_step != self.saved_step:
            self.save(trainer)


class BestCheckpoint(ModelCheckpoint):
    """Save best.ckpt after the validation with the best value of a metric.

    With `top_k` above 1, also keep the `top_k` best ones as best-step=STEP.ckpt. Lightning's
    callback forgets the best one when a folder is moved.
    """

    def __init__(
        self,
        *,
        monitor: str = "val/dice",
        mode: Literal["max", "min"] = "max",
        top_k: int = 1,
    ):
        check_mode("callbacks.best_checkpoint.mode", monitor, mode)
        super().__init__(
            filename="best" if top_k == 1 else "best-step={step:06d}",
            monitor=monitor,
            mode=mode,
            save_top_k=top_k,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self.step: int | None = None  # of best.ckpt

    @property
    def state_key(self) -> str:
        """Return the name of its state in a checkpoint, which no option changes."""
        return "BestCheckpoint"

    def setup(self, trainer: Trainer, *args: Any, **options: Any) -> None:
        self.dirpath = str(Path(trainer.default_root_dir, "checkpoints"))  # not that of a logger
        super().setup(trainer, *args, **options)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        save_logs(trainer)
        if filepath == self.best_model_path:
            self.step = trainer.global_step
        super()._save_checkpoint(trainer, filepath)
        if filepath == self.best_model_path and Path(filepath).name != BEST:
            trainer.save_checkpoint(Path(filepath).with_name(BEST))

    def state_dict(self) -> dict[str, Any]:
        """Return the score of each file, by its name in the folder."""
        scores = {Path(path).name: float(v) for path, v in self.best_k_models.items()}
        return {"scores": scores, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        scores = {
            str(path): torch.tensor(value)
            for name, value in state_dict["scores"].items()
            if (path := Path(self.dirpath or "", name)).exists()
        }
        if not scores:
            return
        self.step = state_dict.get("step")
        best, worst = (max, min) if self.mode == "max" else (min, max)
        while len(scores) > self.save_top_k > 0:  # which a resumed run may change
            del scores[worst(scores, key=scores.__getitem__)]
        scores = {str(self._rename(Path(path))): score for path, score in scores.items()}
        self.best_k_models = scores
        self.best_model_path = best(scores, key=scores.__getitem__)
        self.best_model_score = scores[self.best_model_path]
        if len(scores) == self.save_top_k:
            self.kth_best_model_path = worst(scores, key=scores.__getitem__)
            self.kth_value = scores[self.kth_best_model_path]

    def _rename(self, path: Path) -> Path:
        """Return what this `top_k` calls a file, and create it beside best.ckpt of another one."""
        if self.save_top_k == 1:
            return path.with_name(BEST)
        if path.name != BEST:
            return path
        target = path.with_name(f"best-step={load_checkpoint(path)['global_step']:06d}.ckpt")
        rank_zero_only(replace_with_copy)(path, target)
        return target


def save_logs(trainer: Trainer) -> None:
    """Write metrics that precede a checkpoint: a run that is resumed does not log them again."""
    for logger in trainer.loggers:
        logger.save()


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
        try:
            if path.name == LAST and path.exists():
                replace_with_copy(path, path.with_name(PREVIOUS))
            save_checkpoint(checkpoint, path)
        except OSError as error:
            kept = "keeping the previous checkpoint" if path.exists() else "no previous checkpoint"
            message = f"{describe_os_error(error, path)}; {kept}"
            if path.name not in self.failed_saves:
                warn(f"{message}; training continues")
            self.failed_saves[path.name] = message
        else:
            self.failed_saves.pop(path.name, None)

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return load_checkpoint(Path(path), mmap=False)
