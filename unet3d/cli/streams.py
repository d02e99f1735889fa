"""Standard streams that may be lost: a closed terminal or a full log costs lines, not the run."""

import os
import signal
import sys
from contextlib import suppress
from typing import Any, TextIO


class LossyStream:
    """A text stream that drops what cannot be written."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.is_lost = False

    def write(self, text: str) -> int:
        """Write, unless the reader is gone or the disk is full."""
        if not self.is_lost:
            try:
                return self._stream.write(text)
            except (OSError, ValueError):
                self._lose()
        return len(text)

    def flush(self) -> None:
        """Flush, unless the reader is gone or the disk is full."""
        if not self.is_lost:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._lose()

    def _lose(self) -> None:
        """Send the rest to nowhere, and what C libraries write there, too."""
        self.is_lost = True
        with suppress(OSError, ValueError):
            number = os.open(os.devnull, os.O_WRONLY)
            os.dup2(number, self._stream.fileno())
            os.close(number)

    def __iter__(self) -> Any:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_missing_streams() -> None:
    """Open streams that were closed: or the next file that is opened would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def protect_streams() -> None:
    """Let this process survive the loss of its terminal."""
    open_missing_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, LossyStream):
            setattr(sys, name, LossyStream(stream))


def ignore_hangup() -> None:
    """Go on when the terminal is closed, as under nohup."""
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
