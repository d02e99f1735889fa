"""The limits of a run, and the fraction that is done: by steps, epochs or time."""

import time
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.lit.distributed import is_set_on_any_rank
from unet3d.lit.state_types import is_duration


class StoppingLimits(Callback):
    """Stop a run at `max_steps` or `max_seconds`, after a last validation.

    With Lightning's own step and time limits, a run that is interrupted within that validation
    could not resume it. Epochs are left to Lightning (trainer.max_epochs).
    """

    def __init__(self, *, max_steps: int | None = None, max_seconds: float | None = None):
        self.max_steps, self.max_seconds = max_steps, max_seconds
        self.previous_seconds = 0.0  # of the runs that this one resumes
        self.start: float | None = None

    @property
    def elapsed(self) -> float:
        """Return the seconds of training and validation, including previous runs."""
        seconds = 0.0 if self.start is None else time.monotonic() - self.start
        return self.previous_seconds + seconds

    def fraction_done(self, trainer: pl.Trainer) -> float:
        """Return the fraction of the run that is done, by the limit that comes first."""
        return min(1.0, max(self.fractions(trainer), default=0.0))

    def fractions(self, trainer: pl.Trainer) -> list[float]:
        """Return the fraction that is done, one for each limit that is set."""
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

    def is_reached(self, steps: int) -> bool:
        """Return whether the run has reached its limit of steps or time."""
        by_steps = self.max_steps is not None and steps >= self.max_steps
        return by_steps or (self.max_seconds is not None and self.elapsed >= self.max_seconds)

    def on_train_start(self, *_: Any) -> None:
        self.start = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        reached = self.is_reached(trainer.global_step)
        if self.max_seconds is not None:  # the ranks' clocks differ
            reached = is_set_on_any_rank(trainer, reached)
        if reached or trainer.should_stop:
            trainer.should_stop = True
            trainer.check_val_every_n_epoch = 1

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking and self.is_reached(trainer.global_step):
            trainer.should_stop = True  # the run was resumed in its last validation

    STATE: ClassVar = {"elapsed": is_duration}

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed": self.elapsed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.previous_seconds = state_dict["elapsed"]
