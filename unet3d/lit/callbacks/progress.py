"""The time left of a run: beside the progress bar, or in lines of a log."""

import time
from collections.abc import Sequence
from math import isfinite, nan
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from unet3d.lit.callbacks.stopping import StoppingLimits

BAR = "{desc}|{bar}| {n_fmt}/{total_fmt} [{rate_noinv_fmt}{postfix}]"


class TimeLeft:
    """Estimates the seconds to the end of a run from what this process has done.

    Each limit goes on as fast as it did since the first step of this process, which is left out as
    it warms up; the limit that is reached first counts. The time from the end of one validation to
    the end of the next is taken as a whole, so that the estimate counts validations and just runs
    down in between.
    """

    def __init__(self) -> None:
        self.first: tuple[float, Sequence[float]] | None = None
        self.latest: tuple[float, Sequence[float]] | None = None

    def step(self, now: float, fractions: Sequence[float]) -> None:
        """Take note of the end of a training step."""
        self.first = self.first or (now, fractions)

    def validated(self, now: float, fractions: Sequence[float]) -> None:
        """Take note of the end of a validation."""
        if self.first is not None:
            self.latest = now, fractions

    def seconds(self, now: float, fractions: Sequence[float]) -> float | None:
        """Return the estimate; None before there is one."""
        for at, done in filter(None, (self.latest, (now, fractions))):
            lefts = self._lefts(at, done)
            if lefts:
                return max(0.0, min(lefts) - (now - at))
        return None

    def _lefts(self, at: float, done: Sequence[float]) -> list[float]:
        if self.first is None:
            return []
        begun, before = self.first
        pairs = zip(before, done, strict=True)
        return [(at - begun) * max(0.0, 1 - d) / (d - b) for b, d in pairs if d > b]


class Timed(Callback):
    """Keeps how far the run is, in words."""

    def __init__(self, limits: StoppingLimits):
        super().__init__()
        self.limits, self.left, self.end = limits, TimeLeft(), ""

    def epoch(self, trainer: pl.Trainer) -> str:
        """Return `epoch 3/20`, or without the latter if another limit ends the run."""
        last = trainer.max_epochs or -1
        return f"epoch {trainer.current_epoch + 1}" + (f"/{last}" if last > 0 else "")

    def estimate(self, trainer: pl.Trainer) -> None:
        """Look at the clock."""
        seconds = self.left.seconds(time.monotonic(), self.limits.fractions(trainer))
        self.end = f", training ends in {duration(seconds)}" if seconds else ""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.left.step(time.monotonic(), self.limits.fractions(trainer))
        self.estimate(trainer)

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.left.validated(time.monotonic(), self.limits.fractions(trainer))
            self.estimate(trainer)


class ProgressBar(TQDMProgressBar):
    """Lightning's bar for each epoch, with the time left of training before it."""

    def __init__(self, limits: StoppingLimits):
        super().__init__(leave=True)
        self.timed = Timed(limits)

    def init_train_tqdm(self) -> Tqdm:
        """Return a bar without the epoch's own times: there is one end to look at."""
        bar = super().init_train_tqdm()
        bar.bar_format = BAR
        return bar

    def get_metrics(self, trainer: pl.Trainer, *args: Any) -> dict[str, Any]:
        """Return what narrow terminals cut off last; MiB as a whole number, not as 1.2e+3."""
        metrics = sorted(super().get_metrics(trainer, *args).items(), key=lambda x: "mib" in x[0])
        return {k: f"{v:.0f}" if "mib" in k and isinstance(v, float) else v for k, v in metrics}

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        self._describe(trainer)
        self.train_progress_bar.refresh()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.timed.on_train_batch_end(trainer)
        self._describe(trainer)
        super().on_train_batch_end(trainer, *args)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_validation_batch_end(trainer, *args, **kwargs)
        if not trainer.sanity_checking:
            self.timed.estimate(trainer)
            self._describe(trainer)
            self.train_progress_bar.refresh()

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.timed.on_validation_end(trainer)
        if not trainer.sanity_checking:
            self._describe(trainer)
        super().on_validation_end(trainer, *args)

    def _describe(self, trainer: pl.Trainer) -> None:
        said = self.timed.epoch(trainer).capitalize() + self.timed.end
        self.train_progress_bar.set_description(said, refresh=False)


class ProgressLines(Timed):
    """A line after each validation, or after each epoch of a run that has none; for logs."""

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_validation_end(trainer)
        if not trainer.sanity_checking:
            self._say(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.enable_validation:
            self.estimate(trainer)
            self._say(trainer)

    def _say(self, trainer: pl.Trainer) -> None:
        most = self.limits.max_steps
        steps = f"step {trainer.global_step}" + ("" if most is None else f"/{most}")
        said = [self.epoch(trainer), steps]
        for name, key in (("loss", "train/loss"), ("Dice", "val/dice")):
            value = float(trainer.callback_metrics.get(key, nan))
            if isfinite(value):
                said.append(f"{name} {value:.4f}")
        if trainer.is_global_zero:
            print(", ".join(said) + self.end, flush=True)  # a log is read while it grows


def duration(seconds: float) -> str:
    """Return a time as a person would say it.

    >>> [duration(s) for s in (5.4, 89, 754, 7500, 200_000)]
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
