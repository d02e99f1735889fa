"""Files that are there whole or not at all, whatever happens while they are written."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Generator[Path]:
    """A file to write that becomes `path` once the disk has it, or is gone."""
    draft = path.with_name(f".{os.getpid()}-{path.name}")  # the ending stays: writers go by it
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # as of a full disk
            error.filename = str(path)
        raise
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
