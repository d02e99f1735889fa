"""Atomic writes: after a crash a file or folder is the old one or the new one, never a part."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


def find_existing_dir(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


@contextmanager
def atomic_write(path: Path) -> Generator[Path]:
    """Yield a temporary path; after the body, sync it to disk and move it to `path`.

    If the body raises, the temporary file is removed and `path` is unchanged.
    """
    draft = path.with_name(f".{os.getpid()}-{path.name}")  # writers choose a format by suffix
    try:
        yield draft
        with draft.open("r+b") as file:  # Windows syncs only what is open for writing
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # such as a full disk
            error.filename = str(path)
        raise
    finally:
        with suppress(PermissionError):  # Windows removes no file that is still mapped
            draft.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # Windows cannot open a folder to sync it
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def create_folder(path: Path) -> Generator[Path]:
    """Yield a new temporary folder; after the body, move it to `path`.

    If another process has created `path` in the meantime, that folder stays and ours is removed.
    """
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield draft
        draft.chmod(0o755)
        try:
            draft.rename(path)
        except OSError:
            if not path.exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
