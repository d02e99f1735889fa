"""What signals that stop a command do: raise Interrupted, at once or when a callback asks."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType

from unet3d.errors import STOP_SIGNALS, Interrupted

RETRY_SECONDS = 0.05


class SignalListener:
    """Record signals; unless `defers_exit`, the first one also raises Interrupted.

    Signals that follow it are ignored, but for a second Ctrl-C. While a module is imported, a
    signal waits; if `is_idle`, it ends the process at once. Signals that the process was started
    to ignore stay ignored. Lightning's own handlers broadcast within the handler, which
    deadlocks, and exit with status 0.
    """

    def __init__(self) -> None:
        self.received: int | None = None  # the last signal received
        self.defers_exit = False  # whether a callback ends the run at a good moment
        self.is_idle = False  # whether there is nothing that would have to be cleaned up
        self.is_imported = is_importing(sys._getframe())  # whether all of the program is imported

    @contextmanager
    def listening(
        self, numbers: Sequence[signal.Signals] = STOP_SIGNALS
    ) -> Generator["SignalListener"]:
        """Install the handlers for the duration of the context; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {n: signal.signal(n, self._handle) for n in drop_ignored(numbers)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def listen_until_exit(self, numbers: Sequence[signal.Signals]) -> None:
        """Install the handlers for the rest of the process.

        What is left then is the interpreter's own cleanup, in which signals are ignored: they
        would replace the exit code of a command that is done.
        """
        for number in numbers:
            signal.signal(number, self._handle)
        atexit.register(ignore_signals, numbers)  # the first to be registered is the last to run

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        second_ctrl_c = self.received == number == signal.SIGINT
        if self.is_idle:
            os.write(2, f"unet3d: interrupted by {Interrupted(number)}\n".encode())
            os._exit(Interrupted(number).exit_code)
        if self.defers_exit:
            self.received = number
            if second_ctrl_c:
                raise Interrupted(number)
        elif is_importing(frame) and not self.is_imported:
            send_again(number)
        else:
            self.received = number
            if is_first or second_ctrl_c:
                raise Interrupted(number)


def drop_ignored(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this process was not started to ignore."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported.

    Many packages catch what is raised there, or stay half imported and fail in odd ways later.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False


def send_again(number: int) -> None:
    """Send a signal to this process a little later."""
    timer = threading.Timer(RETRY_SECONDS, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def ignore_signals(numbers: Sequence[signal.Signals]) -> None:
    """Ignore signals from now on."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def let_signals_end_process() -> Generator[None]:
    """Do without handlers, which cannot run while a C library waits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {n: h for n in STOP_SIGNALS if (h := signal.getsignal(n)) != signal.SIG_IGN}
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
