"""SIGTERM, SIGUSR1 and Ctrl-C: finish the step, write one checkpoint, leave."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.errors import Interrupted
from unet3d.lit.callbacks.checkpoints import LastCheckpoint
from unet3d.lit.callbacks.resume_state import is_optimizer_step
from unet3d.lit.distributed import any_rank

HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SignalListener:
    """What was heard. While `waits`, a signal is noted and no more; else it ends the process.

    Lightning's own handlers broadcast within the handler, which deadlocks, and exit with status 0.
    """

    def __init__(self) -> None:
        self.heard: int | None = None
        self.waits = False

    @contextmanager
    def listening(self) -> Generator["SignalListener"]:
        """Hear signals in here."""
        before = {number: signal.signal(number, self._hear) for number in HEARD}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: Any) -> None:
        impatient = self.heard == number == signal.SIGINT
        self.heard = number
        if impatient or not self.waits:
            raise Interrupted(number)


class Preemption(Callback):
    """Leaves between two steps, or within a validation; the ranks agree on when.

    What the validation was for is done when the run goes on: the checkpoint says that it is due.
    """

    def __init__(self, signals: SignalListener, last: LastCheckpoint):
        self.signals, self.last = signals, last

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        trainer._signal_connector.register_signal_handlers = lambda: None

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.signals.waits = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if is_optimizer_step(trainer) and self._asked(trainer):
            self._save(trainer)
            # Lightning leaves once this step is logged, or a validation begins: see below.
            trainer._signal_connector.received_sigterm = True

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.received_sigterm:
            self._leave()

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._asked(trainer):
            if trainer.global_step > 0:
                self._save(trainer)
            self._leave()

    def _asked(self, trainer: pl.Trainer) -> bool:
        asked = any_rank(trainer, self.signals.heard is not None)
        if asked and self.signals.heard is None:
            self.signals.heard = signal.SIGTERM  # another rank has heard it
        return asked

    def _save(self, trainer: pl.Trainer) -> None:
        self.last.save(trainer)
        any_rank(trainer, True)  # none leaves while the first writes: whoever waits may end it

    def _leave(self) -> None:
        assert self.signals.heard is not None
        raise Interrupted(self.signals.heard)

    def on_fit_end(self, *_: Any) -> None:
        self.signals.waits = False
