"""How much of a run is done, by whichever limit comes first: steps, epochs or time."""

import re
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.errors import UsageError
from unet3d.lit.distributed import any_rank


class StoppingLimits(Callback):
    """Ends a run after so many steps or seconds; then what it has reached is validated.

    Lightning's own limits of steps and time would not let a run that was stopped within that last
    validation come back to it. Epochs are Lightning's (trainer.max_epochs).
    """

    def __init__(self, *, max_steps: int | None = None, max_seconds: float | None = None):
        self.max_steps, self.max_seconds = max_steps, max_seconds
        self.before = 0.0  # seconds, in the runs that this one goes on from
        self.begun: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds of training and validation."""
        return self.before + (0.0 if self.begun is None else time.monotonic() - self.begun)

    def fraction_done(self, trainer: pl.Trainer) -> float:
        """From 0 to 1; 0 for a run without limits."""
        return min(1.0, max(self.fractions(trainer), default=0.0))

    def fractions(self, trainer: pl.Trainer) -> list[float]:
        """By each limit that there is: how much of it is used up."""
        fractions = []
        if self.max_steps is not None:
            fractions.append(trainer.global_step / self.max_steps)
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
            epochs = trainer.current_epoch + done / trainer.num_training_batches
            fractions.append(epochs / trainer.max_epochs)
        if self.max_seconds is not None:
            fractions.append(self.elapsed / self.max_seconds)
        return fractions

    def reached(self, steps: int) -> bool:
        """Whether the run ends here."""
        by_steps = self.max_steps is not None and steps >= self.max_steps
        return by_steps or (self.max_seconds is not None and self.elapsed >= self.max_seconds)

    def on_train_start(self, *_: Any) -> None:
        self.begun = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        reached = self.reached(trainer.global_step)
        if self.max_seconds is not None:  # clocks differ
            reached = any_rank(trainer, reached)
        if reached or trainer.should_stop:
            trainer.should_stop = True
            trainer.check_val_every_n_epoch = 1

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking and self.reached(trainer.global_step):
            trainer.should_stop = True  # the run came back to its last validation

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed": self.elapsed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = state_dict["elapsed"]


def parse_max_time(max_time: Any) -> float | None:
    """Of trainer.max_time.

    >>> parse_max_time("00:01:30:00")
    5400.0
    """
    if max_time is None:
        return None
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", str(max_time))
    if match is None:
        raise UsageError(f"trainer.max_time must be DD:HH:MM:SS, got {max_time!r}")
    d, h, m, s = map(int, match.groups())
    return float(((d * 24 + h) * 60 + m) * 60 + s)
