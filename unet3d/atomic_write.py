"""Atomic writes: after a crash a file has its old content or its new one, never a part."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Generator[Path]:
    """Yield a temporary path; after the body, sync it to disk and move it to `path`.

    If the body raises, the temporary file is removed and `path` is unchanged.
    """
    draft = path.with_name(f".{os.getpid()}-{path.name}")  # writers choose a format by suffix
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # such as a full disk
            error.filename = str(path)
        raise
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
