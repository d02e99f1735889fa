"""Training progress with the estimated time left: a progress bar, or lines in a log."""

import time
from collections.abc import Sequence
from math import isfinite, nan
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from unet3d.training.limits import StoppingLimits

BAR = "{desc}|{bar}| {n_fmt}/{total_fmt} [{rate_noinv_fmt}{postfix}]"


class TimeLeft:
    """Estimate the seconds until a run ends, from the speed of this process.

    Each limit is extrapolated from its progress since the first step, which is excluded as warmup;
    the limit that is reached first counts. Once there is a validation, speed is measured up to the
    end of the last one, so that the estimate includes validations and counts down between them.
    """

    def __init__(self) -> None:
        self.first: tuple[float, Sequence[float]] | None = None
        self.latest: tuple[float, Sequence[float]] | None = None

    def record_step(self, now: float, fractions: Sequence[float]) -> None:
        """Record the end of a training step."""
        self.first = self.first or (now, fractions)

    def record_validation(self, now: float, fractions: Sequence[float]) -> None:
        """Record the end of a validation."""
        if self.first is not None:
            self.latest = now, fractions

    def estimate_seconds(self, now: float, fractions: Sequence[float]) -> float | None:
        """Return the estimate; None before the second step."""
        for time_, done in filter(None, (self.latest, (now, fractions))):
            estimates = self._extrapolate(time_, done)
            if estimates:
                return max(0.0, min(estimates) - (now - time_))
        return None

    def _extrapolate(self, time_: float, done: Sequence[float]) -> list[float]:
        """Return the seconds left from `time_` on, for each limit that has progressed."""
        if self.first is None:
            return []
        start, done_at_start = self.first
        pairs = zip(done_at_start, done, strict=True)
        return [(time_ - start) * max(0.0, 1 - d) / (d - d0) for d0, d in pairs if d > d0]


class RunProgress(Callback):
    """Describe the position of a run and the time left."""

    def __init__(self, limits: StoppingLimits):
        super().__init__()
        self.limits, self.time_left, self.suffix = limits, TimeLeft(), ""

    def format_epoch(self, trainer: pl.Trainer) -> str:
        """Return `epoch 3/20`, or `epoch 3` if another limit ends the run."""
        last = trainer.max_epochs or -1
        return f"epoch {trainer.current_epoch + 1}" + (f"/{last}" if last > 0 else "")

    def update_time_left(self, trainer: pl.Trainer) -> None:
        """Update the time left."""
        seconds = self.time_left.estimate_seconds(time.monotonic(), self.limits.fractions(trainer))
        self.suffix = f", training ends in {format_duration(seconds)}" if seconds else ""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.time_left.record_step(time.monotonic(), self.limits.fractions(trainer))
        self.update_time_left(trainer)

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.time_left.record_validation(time.monotonic(), self.limits.fractions(trainer))
            self.update_time_left(trainer)


class ProgressBar(TQDMProgressBar):
    """Show Lightning's progress bar of each epoch, with the time left of the whole run."""

    def __init__(self, limits: StoppingLimits):
        super().__init__(leave=True)
        self.run_progress = RunProgress(limits)

    def init_train_tqdm(self) -> Tqdm:
        """Return a bar without the epoch's own times, which would compete with the time left."""
        bar = super().init_train_tqdm()
        bar.bar_format = BAR
        return bar

    def get_metrics(self, trainer: pl.Trainer, *args: Any) -> dict[str, Any]:
        """Return the metrics with memory last, where narrow terminals cut off, as whole MiB."""
        metrics = sorted(super().get_metrics(trainer, *args).items(), key=lambda x: "mib" in x[0])
        return {k: f"{v:.0f}" if "mib" in k and isinstance(v, float) else v for k, v in metrics}

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        self._describe(trainer)
        self.train_progress_bar.refresh()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.run_progress.on_train_batch_end(trainer)
        self._describe(trainer)
        super().on_train_batch_end(trainer, *args)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_validation_batch_end(trainer, *args, **kwargs)
        if not trainer.sanity_checking:
            self.run_progress.update_time_left(trainer)
            self._describe(trainer)
            self.train_progress_bar.refresh()

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.run_progress.on_validation_end(trainer)
        if not trainer.sanity_checking:
            self._describe(trainer)
        super().on_validation_end(trainer, *args)

    def _describe(self, trainer: pl.Trainer) -> None:
        description = (
            self.run_progress.format_epoch(trainer).capitalize() + self.run_progress.suffix
        )
        self.train_progress_bar.set_description(description, refresh=False)


class ProgressLines(RunProgress):
    """Print a line after each validation, or after each epoch without validation; for logs."""

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_validation_end(trainer)
        if not trainer.sanity_checking:
            self._print_line(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.enable_validation:
            self.update_time_left(trainer)
            self._print_line(trainer)

    def _print_line(self, trainer: pl.Trainer) -> None:
        max_steps = self.limits.max_steps
        step = f"step {trainer.global_step}" + ("" if max_steps is None else f"/{max_steps}")
        parts = [self.format_epoch(trainer), step]
        for name, key in (("loss", "train/loss"), ("Dice", "val/dice")):
            value = float(trainer.callback_metrics.get(key, nan))
            if isfinite(value):
                parts.append(f"{name} {value:.4f}")
        if trainer.is_global_zero:
            print(", ".join(parts) + self.suffix, flush=True)  # logs are read during the run


def format_duration(seconds: float) -> str:
    """Return a duration in readable units.

    >>> [format_duration(s) for s in (5.4, 89, 754, 7500, 200_000)]
    ['5 s', '89 s', '13 min', '2 h 05 min', '2 d 8 h']
    """
    if round(seconds) < 120:
        return f"{round(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"
