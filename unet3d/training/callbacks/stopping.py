"""What ends a run: its limits, a validation that no longer improves, or a signal."""

import signal
from collections.abc import Callable
from datetime import timedelta
from math import inf
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import Callback, Timer

from unet3d.errors import Interrupted, UsageError
from unet3d.signals import SignalListener
from unet3d.training.distributed import RankAgreement
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
    """

    def __init__(
        self,
        ranks: RankAgreement,
        *,
        max_steps: int | None = None,
        max_seconds: float | None = None,
    ):
        super().__init__(None if max_seconds is None else timedelta(seconds=max_seconds))
        self.ranks, self.max_steps, self.max_seconds = ranks, max_steps, max_seconds
        self.get_seconds = ranks.share(self.time_elapsed)  # of the clock that is ahead
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
            fractions.append(self.get_seconds() / self.max_seconds)
        return min(1.0, max(fractions))

    def ended_early(self, steps: int) -> bool:
        """Return whether time has ended the run long before the steps that were planned."""
        return self.out_of_time and steps < EARLY_FRACTION * self.planned_steps

    def is_reached(self, steps: int) -> bool:
        """Return whether the run has reached its limit of steps or time."""
        return steps >= (self.max_steps or inf) or self.get_seconds() >= (self.max_seconds or inf)

    def on_fit_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Do not stop yet: the last validation of a run that is resumed may be missing."""

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_start(trainer, *args)
        first = self.ranks.exchange(torch.zeros((), device=trainer.strategy.root_device))
        if first:  # before the first rate is computed
            self.ranks.accept(torch.stack(first).tolist())

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if not is_optimizer_step(trainer):
            return
        if self.is_reached(trainer.global_step):
            trainer.should_stop = True
        if trainer.should_stop:
            trainer.check_val_every_n_epoch = 1

    def on_validation_start(self, trainer: Trainer, *args: Any) -> None:
        super().on_validation_start(trainer, *args)
        if not trainer.sanity_checking and self.is_reached(trainer.global_step):
            trainer.should_stop = True  # time ran out since the step, or the run was resumed here

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_end(trainer, *args)
        by_epochs = trainer.estimated_stepping_batches if (trainer.max_epochs or -1) > 0 else inf
        planned = min(self.max_steps or inf, by_epochs)
        is_over = self.get_seconds() >= (self.max_seconds or inf)
        self.out_of_time = is_over and trainer.global_step < planned
        self.planned_steps = planned if planned < inf else FEWEST_STEPS


def check_mode(key: str, monitor: str, mode: str) -> None:
    """Refuse to look for the highest value of a metric that is better when it is lower."""
    metric = monitor.removeprefix("val/").partition("/")[0]
    if mode == "max" and metric in ("loss", "hd95_mm", "volume_error", "ece"):
        raise UsageError(f"lower values of {monitor} are better: set {key}=min")


class EarlyStopping(callbacks.EarlyStopping):
    """Keep the configured patience in a resumed run: Lightning takes it from the checkpoint."""

    def __init__(self, monitor: str, mode: str = "min", **options: Any):
        check_mode("callbacks.early_stopping.mode", monitor, mode)
        super().__init__(monitor, mode=mode, **options)

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
        self, signals: SignalListener, ranks: RankAgreement, save: Callable[[Trainer], None]
    ):
        self.signals, self.save = signals, save
        self.is_requested = ranks.share(lambda: signals.received is not None)

    def setup(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        disable_signal_handlers(trainer)

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        self.signals.defers_exit = True

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if is_optimizer_step(trainer) and self.is_requested():
            self.signals.received = self.signals.received or signal.SIGTERM  # that of another rank
            self.save(trainer)
            request_exit(trainer)  # once this step is logged, or a validation would start

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.received_sigterm:
            raise Interrupted(self.signals.received or signal.SIGTERM)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        received = self.signals.received is not None
        if trainer.strategy.reduce_boolean_decision(received, all=False):
            if trainer.global_step > 0:
                self.save(trainer)
            raise Interrupted(self.signals.received or signal.SIGTERM)
