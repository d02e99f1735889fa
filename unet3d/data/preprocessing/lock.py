"""Let one process fill a folder of the cache while others wait for it."""

import errno
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from unet3d.atomic_write import create_folder, name_file

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl: Any = None

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as Lustre mounted without `flock`."""


@contextmanager
def lock_cache(
    folder: Path, is_usable: Callable[[Path], bool] = Path.exists
) -> Generator[Path | None]:
    """Yield an empty folder that replaces `folder` on success; None if that is usable already.

    Other threads, ranks and runs that want the same folder wait. The draft of a killed process is
    emptied and reused. Without locks nobody waits: each fills a draft, and the first one is kept.
    """
    draft = folder.with_name(f".{folder.name}")
    while not is_usable(folder):
        is_new = False
        if draft.is_symlink() or draft.is_file():  # a link leads to any folder
            draft.unlink(missing_ok=True)
        with suppress(FileExistsError):  # exist_ok=True raises it if the folder is then renamed
            draft.mkdir()
            is_new = True
        try:
            handle = lock_folder(draft)
        except FileNotFoundError:  # another process has just renamed or removed it
            continue
        except OSError:
            if is_new:
                with suppress(OSError):
                    draft.rmdir()
            raise
        if handle is None:
            shutil.rmtree(draft, ignore_errors=True)
            with (
                TemporaryDirectory(prefix=".", dir=folder.parent) as damaged,
                suppress(FileNotFoundError),  # usually there is none
            ):
                folder.rename(Path(damaged) / "entry")  # later it may be that of another run
            with create_folder(folder) as own:
                yield own
            return
        try:
            if not _is_same_folder(handle, draft):
                continue  # it was renamed or removed while we waited
            if is_usable(folder):  # finished before we created the draft
                shutil.rmtree(draft)
                break
            for leftover in draft.iterdir():
                _remove(leftover)
            try:
                yield draft
                _remove(folder)
                draft.rename(folder)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
            return
        finally:
            os.close(handle)
    yield None


def _remove(path: Path) -> None:
    """Remove a damaged folder, or what lies in its place, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock_folder(folder: Path) -> int | None:
    """Wait for the lock of a folder; return the handle that holds it, None if there are no locks.

    The system releases the lock when the handle is closed or the process dies. A symbolic link is
    refused: the folder that it leads to may be any.
    """
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with name_file(folder):
            fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        os.close(handle)
        if error.errno in NO_LOCKS:
            return None
        raise
    return handle


def has_locks(folder: Path) -> bool:
    """Return whether an existing folder can be locked."""
    handle = lock_folder(folder.resolve())
    if handle is not None:
        os.close(handle)
    return handle is not None


def _is_same_folder(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False
