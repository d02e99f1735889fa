"""Standard streams that may be lost, and that take no orders for a terminal from what is written.

A closed terminal or a full log costs lines, not the run. Names of files and classes are shown as
they are, and a terminal would obey what is in them.
"""

import os
import re
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from io import TextIOWrapper
from typing import Any, TextIO

from unet3d.text import escape_unprintable

CURSOR_MOVES = re.compile(r"(\n|\x1b\[A)+")
"""What progress bars write to move between their lines, in a write of its own."""

SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colors and the like, which some loggers write."""


def make_plain(text: str) -> str:
    r"""Return text without colors, and with escapes for other control characters than lines.

    A carriage return may begin it, and cursor moves may be all of it, as progress bars write them.

    >>> print(make_plain("\x1b[31mred\x1b[0m a\x07b\x1b]0;title\n"), end="")
    red a\x07b\x1b]0;title
    """
    if text.isprintable() or CURSOR_MOVES.fullmatch(text):
        return text
    start = "\r" if text.startswith("\r") else ""
    return start + escape_unprintable(SEQUENCES.sub("", text.removeprefix(start)), keep="\n\t")


class SafeStream:
    """A text stream that writes plain text, and drops what cannot be written."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.is_lost = False
        self.error: OSError | None = None  # why, unless nobody reads any more

    def write(self, text: str) -> int:
        """Write, unless the reader is gone or the disk is full."""
        if not self.is_lost:
            try:
                self._stream.write(make_plain(text))
            except (OSError, ValueError) as error:
                self._lose(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of these texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, unless the reader is gone or the disk is full."""
        if not self.is_lost:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Send the rest to nowhere, and what C libraries write there, too."""
        self.is_lost = True
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            self.error = error
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
        if not isinstance(stream, SafeStream):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # characters that it cannot encode
            setattr(sys, name, SafeStream(stream))


def find_lost_output() -> OSError | None:
    """Return why not all of standard output could be written; None where nobody reads any more."""
    stream = sys.stdout
    if not isinstance(stream, SafeStream):
        return None
    stream.flush()
    return stream.error


def ignore_hangup() -> None:
    """Go on when the terminal is closed, as under nohup."""
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
