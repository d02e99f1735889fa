"""What signals that stop a command do: raise Interrupted, at once or when a callback asks."""

import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType

from unet3d.errors import STOP_SIGNALS, Interrupted


class SignalListener:
    """Record signals; unless `defers_exit`, the first one also raises Interrupted.

    Signals that follow it are ignored, but for a second Ctrl-C. Lightning's own handlers broadcast
    within the handler, which deadlocks, and exit with status 0.
    """

    def __init__(self) -> None:
        self.received: int | None = None  # the last signal received
        self.defers_exit = False  # whether a callback ends the run at a good moment

    @contextmanager
    def listening(self) -> Generator["SignalListener"]:
        """Install the handlers for the duration of the context; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {n: signal.signal(n, self._handle) for n in drop_ignored(STOP_SIGNALS)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        second_ctrl_c = self.received == number == signal.SIGINT
        self.received = number
        if second_ctrl_c or (is_first and not self.defers_exit):
            raise Interrupted(number)


def drop_ignored(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this process was not started to ignore, as by nohup."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def let_signals_end_process() -> Generator[None]:
    """Do without handlers, which cannot run while a C library waits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {n: signal.getsignal(n) for n in drop_ignored(STOP_SIGNALS)}
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
