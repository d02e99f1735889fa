"""Exceptions that become exit codes."""

from __future__ import annotations

import signal


class UsageError(ValueError):
    """The user asked for what cannot be: one line, what was expected and what was given. Exit 2."""


class DoesNotFitError(RuntimeError):
    """The run does not fit the device's memory. Exit 3."""


class PredictedOutOfMemoryError(DoesNotFitError):
    """Predicted not to fit, so that a sweep leaves it out."""


class RunError(RuntimeError):
    """Something broke while running: NaN, a dead worker, a vanished file. Exit 4."""


class Interrupted(BaseException):
    """Somebody asked the process to end: Ctrl-C (exit 130), or SIGTERM or SIGUSR1 (exit 143)."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 130 if number == signal.SIGINT else 143
