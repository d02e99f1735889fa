"""The limits of a run, and the fraction that is done: by steps, epochs or time."""

from collections.abc import Sequence
from datetime import timedelta
from math import inf
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer

from unet3d.config.values import format_duration
from unet3d.errors import UsageError
from unet3d.report.training_warnings import EARLY_FRACTION, append_overrides
from unet3d.training.lightning_internals import is_optimizer_step

MIN_STEPS = 20
"""Steps that must fit into the time of a new run, unless it has fewer: fewer learn nothing."""

MEASURED_STEPS = 3
"""Steps after which a run knows how long a step takes; the first one is warmup."""


class StoppingLimits(Timer):
    """Stop a run at `max_steps` or `max_seconds`, after a last validation.

    Lightning's Trainer(max_steps=) ends a run without that validation. Epochs are left to
    Lightning (trainer.max_epochs). A new run is refused when its time is too short for `MIN_STEPS`
    of the duration that was measured.
    """

    def __init__(
        self,
        *,
        max_steps: int | None = None,
        max_seconds: float | None = None,
        step_seconds: Sequence[float] = (),
        cheaper_step: Sequence[str] = (),
    ):
        super().__init__(None if max_seconds is None else timedelta(seconds=max_seconds))
        self.max_steps, self.max_seconds = max_steps, max_seconds
        self.step_seconds = step_seconds  # of this process; another callback appends to it
        self.cheaper_step = cheaper_step  # overrides
        self.out_of_time = False  # whether time ended the run, not another limit
        self.planned_steps = inf  # of the other limits
        self.is_resumed = False

    def fraction_done(self, trainer: pl.Trainer) -> float:
        """Return the fraction of the run that is done, by the limit that comes first."""
        return min(1.0, max(self.fractions(trainer), default=0.0))

    def fractions(self, trainer: pl.Trainer) -> list[float]:
        """Return the fraction that is done, one for each limit that is set."""
        fractions = []
        if self.max_steps is not None:
            fractions.append(trainer.global_step / self.max_steps)
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
            epochs = trainer.current_epoch + batches.processed / trainer.num_training_batches
            fractions.append(epochs / trainer.max_epochs)
        if self.max_seconds is not None:
            fractions.append(self.time_elapsed() / self.max_seconds)
        return fractions

    def ended_early(self, steps: int) -> bool:
        """Return whether time has ended the run long before the steps that were planned."""
        return self.out_of_time and steps < EARLY_FRACTION * self.planned_steps < inf

    def is_reached(self, steps: int) -> bool:
        """Return whether the run has reached its limit of steps or time."""
        by_steps = self.max_steps is not None and steps >= self.max_steps
        return by_steps or (
            self.max_seconds is not None and self.time_elapsed() >= self.max_seconds
        )

    def on_fit_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Do not stop yet: the last validation of a run that is resumed may be missing."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if not is_optimizer_step(trainer):
            return
        super().on_train_batch_end(trainer)
        if self.max_seconds is not None:
            self._check_time(trainer, self.max_seconds)
        if self.max_steps is not None and trainer.global_step >= self.max_steps:
            trainer.should_stop = True
        if trainer.should_stop:
            trainer.check_val_every_n_epoch = 1

    def _check_time(self, trainer: pl.Trainer, max_seconds: float) -> None:
        """Note whether time ends the run; refuse a new one that it would end at once."""
        steps, reached = trainer.global_step, trainer.should_stop
        if not reached and (self.is_resumed or steps != MEASURED_STEPS):
            return
        self.planned_steps = min(
            inf if self.max_steps is None else self.max_steps,
            trainer.estimated_stepping_batches if (trainer.max_epochs or -1) > 0 else inf,
        )
        self.out_of_time = reached and steps < self.planned_steps
        needed = min(MIN_STEPS, self.planned_steps)
        if self.is_resumed or steps >= needed:
            return
        # Where time has run out, with validations; else at the speed of the fastest step.
        elapsed = self.time_elapsed() / max(steps, 1)
        step_seconds = elapsed if reached else min(self.step_seconds[1:])
        is_short = reached or needed * step_seconds > max_seconds
        if trainer.strategy.reduce_boolean_decision(is_short, all=False):
            enough = format_duration(1.1 * needed * step_seconds + 1)
            message = (
                f"trainer.max_time={format_duration(max_seconds)} is too short for {needed} steps, "
                f"as a step takes {step_seconds:.3g} s here: set trainer.max_time={enough} or "
                "more, or make a step cheaper"
            )
            raise UsageError(append_overrides(message, self.cheaper_step))

    def on_validation_start(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_validation_start(trainer, *args)
        reached = not trainer.sanity_checking and self.is_reached(trainer.global_step)
        if trainer.strategy.reduce_boolean_decision(reached, all=False):
            trainer.should_stop = True  # the run was resumed in its last validation

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {"train": self.time_elapsed()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.is_resumed = self.time_elapsed() > 0
