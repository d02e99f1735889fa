"""The signals that stop a run: raise an error at once, or note them for a better moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from unet3d.errors import Interrupted

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)
"""Signals that stop a run; Windows has no SIGUSR1."""


@contextmanager
def handle_stop_signals(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> Generator[None]:
    """Install a handler for the stop signals, except those that the process ignores (nohup).

    Only the main thread receives signals: in any other, nothing is installed.
    """
    previous = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


class SignalListener:
    """Record signals; unless `defers_exit`, the first one also raises Interrupted.

    Signals that follow it are ignored, but for a second Ctrl-C. Lightning's own handlers broadcast
    within the handler, which deadlocks, and exit with status 0.
    """

    def __init__(self) -> None:
        self.received: int | None = None  # the last signal received
        self.defers_exit = False  # whether a callback ends the run at a good moment

    @contextmanager
    def listening(self) -> Generator[SignalListener]:
        """Install the handlers for the duration of the context."""
        with handle_stop_signals(self._handle):
            yield self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        second_ctrl_c = self.received == number == signal.SIGINT
        self.received = number
        if second_ctrl_c or (is_first and not self.defers_exit):
            raise Interrupted(number)
