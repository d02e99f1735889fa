"""What ends a run: its limits, a validation that no longer improves, or a signal."""

import signal
from collections.abc import Callable
from datetime import timedelta
from math import inf
from typing import Any

from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import Callback, Timer

from unet3d.errors import Interrupted
from unet3d.signals import SignalListener
from unet3d.training.lightning_internals import (
    disable_signal_handlers,
    is_optimizer_step,
    request_exit,
)

EARLY_FRACTION = 0.1  # a run that time ended before this fraction of its steps is no result yet
FEWEST_STEPS = 200  # steps that are expected of a run that only time limits


class StoppingLimits(Timer):
    """Stop a run at `max_steps` or `max_seconds`, after a last validation.

    Lightning's Trainer(max_steps=) ends a run without that, and its Timer stops a resumed run
    before the validation that was pending. Epochs are left to Lightning (trainer.max_epochs).

    Several ranks have clocks and signals of their own, but one learning rate and one end. They
    agree in every step, together with its loss, and see the same until the next one.
    """

    def __init__(
        self,
        *,
        max_steps: int | None = None,
        max_seconds: float | None = None,
        signals: SignalListener | None = None,
    ):
        super().__init__(None if max_seconds is None else timedelta(seconds=max_seconds))
        self.max_steps, self.max_seconds, self.signals = max_steps, max_seconds, signals
        self.agreed_seconds: float | None = None  # of the clock that is ahead; None: one process
        self.agreed_to_stop = False  # whether a rank had received a signal
        self.agreed_to_save = False  # whether the last checkpoint of a rank was due
        self.is_save_due: Callable[[], bool] = lambda: False
        self.out_of_time = False  # whether time ended the run, not another limit
        self.planned_steps: float = inf  # of the other limits

    def fraction_done(self, trainer: Trainer) -> float:
        """Return the fraction of the run that is done, by the limit that comes first."""
        fractions = [0.0]
        if self.max_steps is not None:
            fractions.append(trainer.global_step / self.max_steps)
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
            epochs = trainer.current_epoch + batches.processed / trainer.num_training_batches
            fractions.append(epochs / trainer.max_epochs)
        if self.max_seconds is not None:
            fractions.append(self._elapsed() / self.max_seconds)
        return min(1.0, max(fractions))

    def list_local(self) -> list[float]:
        """Return what this rank knows alone: its time, its signals, whether to save."""
        received = self.signals is not None and self.signals.received is not None
        return [self.time_elapsed(), float(received), float(self.is_save_due())]

    def agree(self, seconds: float, stop: float, save: float) -> None:
        """Take over what all ranks know: the maximum of what each knows alone."""
        self.agreed_seconds, self.agreed_to_stop, self.agreed_to_save = seconds, stop > 0, save > 0
        if self.agreed_to_stop and self.signals is not None and self.signals.received is None:
            self.signals.received = signal.SIGTERM  # another rank received it

    def _elapsed(self) -> float:
        return self.time_elapsed() if self.agreed_seconds is None else self.agreed_seconds

    def ended_early(self, steps: int) -> bool:
        """Return whether time has ended the run long before the steps that were planned."""
        return self.out_of_time and steps < EARLY_FRACTION * self.planned_steps

    def is_reached(self, steps: int) -> bool:
        """Return whether the run has reached its limit of steps or time."""
        return steps >= (self.max_steps or inf) or self.time_elapsed() >= (self.max_seconds or inf)

    def on_fit_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Do not stop yet: the last validation of a run that is resumed may be missing."""

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_start(trainer, *args)
        if trainer.world_size > 1:
            self.agreed_seconds = trainer.strategy.broadcast(self.time_elapsed())

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if not is_optimizer_step(trainer):
            return
        if self._elapsed() >= (self.max_seconds or inf):
            trainer.should_stop = True
        if self.max_steps is not None and trainer.global_step >= self.max_steps:
            trainer.should_stop = True
        if trainer.should_stop:
            trainer.check_val_every_n_epoch = 1

    def on_validation_start(self, trainer: Trainer, *args: Any) -> None:
        super().on_validation_start(trainer, *args)
        reached = not trainer.sanity_checking and self.is_reached(trainer.global_step)
        if trainer.strategy.reduce_boolean_decision(reached, all=False):
            trainer.should_stop = True  # time ran out since the step, or the run was resumed here

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_end(trainer, *args)
        by_epochs = trainer.estimated_stepping_batches if (trainer.max_epochs or -1) > 0 else inf
        planned = min(self.max_steps or inf, by_epochs)
        is_over = self._elapsed() >= (self.max_seconds or inf)
        self.out_of_time = is_over and trainer.global_step < planned
        self.planned_steps = planned if planned < inf else FEWEST_STEPS


class EarlyStopping(callbacks.EarlyStopping):
    """Keep the configured patience in a resumed run: Lightning takes it from the checkpoint."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.should_stop and self.wait_count >= self.patience:
            pl_module.print(
                f"stopping early: {self.monitor} was not better than {float(self.best_score):.4g} "
                f"in {self.wait_count} validations"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})


class Preemption(Callback):
    """On SIGTERM, SIGUSR1 and Ctrl-C: finish the step or validation volume, `save`, and exit.

    The ranks agree on when. An interrupted validation is repeated when the run is resumed.
    """

    def __init__(
        self, signals: SignalListener, limits: StoppingLimits, save: Callable[[Trainer], None]
    ):
        self.signals, self.limits, self.save = signals, limits, save

    def setup(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        disable_signal_handlers(trainer)

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        self.signals.defers_exit = True

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        one_process = trainer.world_size == 1
        requested = self.signals.received if one_process else self.limits.agreed_to_stop
        if is_optimizer_step(trainer) and requested:
            self.save(trainer)
            request_exit(trainer)  # once this step is logged; on_validation_start may come first

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.received_sigterm:
            raise Interrupted(self.signals.received or signal.SIGTERM)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        received = self.signals.received is not None
        if trainer.strategy.reduce_boolean_decision(received, all=False):
            if trainer.global_step > 0:
                self.save(trainer)
            raise Interrupted(self.signals.received or signal.SIGTERM)
