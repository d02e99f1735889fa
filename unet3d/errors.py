"""Exceptions with exit codes."""

from __future__ import annotations

import signal

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)
"""Signals that stop a run; Windows has no SIGUSR1."""


class UsageError(ValueError):
    """An invalid request: one line on what was expected and what was given. Exit code 2."""


class DoesNotFitError(RuntimeError):
    """The run does not fit into the device's memory. Exit code 3."""


class EstimatedOutOfMemoryError(DoesNotFitError):
    """The run is estimated not to fit; a sweep skips it."""


class RunError(RuntimeError):
    """A failure while running: NaN, a dead worker, a missing file. Exit code 4."""


class Interrupted(BaseException):
    """A signal to stop: Ctrl-C (exit code 130), SIGTERM or SIGUSR1 (exit code 143)."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 130 if number == signal.SIGINT else 143


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
