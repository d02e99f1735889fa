"""On SIGTERM, SIGUSR1 and Ctrl-C: finish the step, save one checkpoint, exit."""

import signal
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.errors import Interrupted
from unet3d.stop_signals import SignalListener
from unet3d.training.checkpoints import LastCheckpoint
from unet3d.training.lightning_internals import (
    disable_signal_handlers,
    disable_sigterm_broadcast,
    is_optimizer_step,
    request_exit,
)


class Preemption(Callback):
    """Save and exit between two steps or within a validation; the ranks agree on when.

    An interrupted validation is repeated when the run is resumed.
    """

    def __init__(self, signals: SignalListener, last: LastCheckpoint):
        self.signals, self.last = signals, last

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        disable_signal_handlers(trainer)  # which deadlock, and exit with status 0
        disable_sigterm_broadcast(trainer)

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.signals.defers_exit = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if is_optimizer_step(trainer) and self._is_stop_requested(trainer):
            self.last.save(trainer)
            request_exit(trainer)  # once this step is logged; on_validation_start may come first

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.received_sigterm:
            self._exit()

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._is_stop_requested(trainer):
            if trainer.global_step > 0:
                self.last.save(trainer)
            self._exit()

    def _is_stop_requested(self, trainer: pl.Trainer) -> bool:
        received = self.signals.received is not None
        requested = trainer.strategy.reduce_boolean_decision(received, all=False)
        if requested and self.signals.received is None:
            self.signals.received = signal.SIGTERM  # another rank received it
        return requested

    def _exit(self) -> None:
        assert self.signals.received is not None
        raise Interrupted(self.signals.received)

    def on_fit_end(self, *_: Any) -> None:
        self.signals.defers_exit = False
