"""Print a command's result, or write it to a file."""

import os
import sys
from pathlib import Path
from typing import Any

from unet3d.files import atomic_write, write_text


def write_output(text: str, path: Path | None) -> None:
    """Print to standard output, or write to a file.

    A result whose reader has seen enough, as in `unet3d memory view=layers | head -1`, is no
    error; a run that can no longer print ends with exit code 1.
    """
    if path is not None:
        write_text(path, text + "\n")
        return
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_output()


def write_figure(figure: Any, path: Path, *, dpi: int) -> None:
    """Write a figure of matplotlib as PNG."""
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=dpi, format="png")


def is_output_lost() -> bool:
    """Return whether nobody reads standard output any more, as in `unet3d train | head`.

    What is still to be printed is then discarded.
    """
    try:
        print(flush=True)
    except BrokenPipeError:
        discard_output()
        return True
    return False


def discard_output() -> None:
    """Discard what is still to be printed, so that the interpreter's last flush succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
