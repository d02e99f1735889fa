"""Training progress with the estimated time left: a progress bar, or lines in a log."""

import time
from math import isfinite, nan
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from unet3d.training.callbacks.stopping import StoppingLimits

BAR = "{desc}|{bar}| {n_fmt}/{total_fmt} [{rate_noinv_fmt}{postfix}]"


class TimeLeft:
    """Estimate when a run ends, from the speed since the first step of this process (a warmup)."""

    def __init__(self, limits: StoppingLimits):
        self.limits = limits
        self.start: tuple[float, float] | None = None  # time and fraction done

    def describe(self, trainer: Trainer) -> str:
        """Return `, training ends in HH:MM:SS`; nothing before the second step and at the end."""
        now, done = time.monotonic(), self.limits.fraction_done(trainer)
        self.start = self.start or (now, done)
        started_at, done_at_start = self.start
        if not done_at_start < done < 1:
            return ""
        seconds = (now - started_at) * (1 - done) / (done - done_at_start)
        return f", training ends in {Tqdm.format_interval(seconds)}"


def format_epoch(trainer: Trainer) -> str:
    """Return `epoch 3/20`, or `epoch 3` if another limit ends the run."""
    last = trainer.max_epochs or -1
    return f"epoch {trainer.current_epoch + 1}" + (f"/{last}" if last > 0 else "")


def format_line(trainer: Trainer, limits: StoppingLimits) -> str:
    """Return what a run has reached: epoch, step, loss and Dice."""
    step = f"step {trainer.global_step}" + (f"/{limits.max_steps}" if limits.max_steps else "")
    parts = [format_epoch(trainer), step]
    for name, key in (("loss", "train/loss"), ("Dice", "val/dice")):
        value = float(trainer.callback_metrics.get(key, nan))
        if isfinite(value):
            parts.append(f"{name} {value:.4f}")
    return ", ".join(parts)


class ProgressBar(TQDMProgressBar):
    """Show Lightning's progress bar with the time left of the run, below a line per validation."""

    def __init__(self, limits: StoppingLimits):
        super().__init__(leave=False)
        self.limits, self.time_left = limits, TimeLeft(limits)

    def init_train_tqdm(self) -> Tqdm:
        """Return a bar without the epoch's own times, which would compete with the time left."""
        bar = super().init_train_tqdm()
        bar.bar_format = BAR
        return bar

    def get_metrics(self, trainer: Trainer, *args: Any) -> dict[str, Any]:
        """Return the metrics with memory last, where narrow terminals cut off, as whole MiB."""
        metrics = sorted(super().get_metrics(trainer, *args).items(), key=lambda x: "mib" in x[0])
        return {k: f"{v:.0f}" if "mib" in k and isinstance(v, float) else v for k, v in metrics}

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description(format_epoch(trainer).capitalize())

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_validation_end(trainer, *args)
        if not trainer.sanity_checking:
            self.print(format_line(trainer, self.limits))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        description = format_epoch(trainer).capitalize() + self.time_left.describe(trainer)
        self.train_progress_bar.set_description(description, refresh=False)
        super().on_train_batch_end(trainer, *args)


class ProgressLines(Callback):
    """Print a line after each validation, or after each epoch without validation; for logs."""

    def __init__(self, limits: StoppingLimits):
        self.limits, self.time_left = limits, TimeLeft(limits)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.time_left.describe(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._print_line(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.enable_validation:
            self._print_line(trainer)

    def _print_line(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            line = format_line(trainer, self.limits) + self.time_left.describe(trainer)
            print(line, flush=True)  # logs are read during the run
