"""Atomic writes: after a crash a file or folder is the old one or the new one, never a part."""

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from hashlib import blake2s
from pathlib import Path
from uuid import uuid4

MAX_NAME_BYTES = 255
"""What file systems allow."""


def find_existing_dir(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


@contextmanager
def name_file(path: Path) -> Generator[None]:
    """Name the file in errors of reading or writing it, which do not.

    torch raises a RuntimeError where a file that was given to it cannot be written.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error.__context__ if type(error) is RuntimeError else error
        if not isinstance(cause, OSError):
            raise
        if cause.filename is None and cause.errno is not None:
            cause.filename = str(path)
        raise cause from None


def name_draft(name: str) -> str:
    """Return the name of the temporary file of a file.

    It ends with the file's name, because writers choose a format by suffix.
    """
    prefix = f".{os.getpid()}-"
    return prefix + shorten_name(name, MAX_NAME_BYTES - len(prefix))


def shorten_name(name: str, limit: int) -> str:
    """Return a name of at most `limit` bytes with the same end; two long names stay two.

    >>> shorten_name("a.nii", 20), shorten_name(100 * "a" + ".nii", 20)
    ('a.nii', '541a37b6-aaaaaaa.nii')
    """
    encoded = os.fsencode(name)
    if len(encoded) <= limit:
        return name
    prefix = blake2s(encoded, digest_size=4).hexdigest() + "-"
    end = encoded[len(prefix) - limit :]
    while end and 0x80 <= end[0] < 0xC0:  # the middle of a character
        end = end[1:]
    return prefix + os.fsdecode(end)


@contextmanager
def atomic_write(path: Path) -> Generator[Path]:
    """Yield a temporary path; after the body, sync it to disk and move it to `path`.

    If the body raises, the temporary file is removed and `path` is unchanged.
    """
    draft = path.with_name(name_draft(path.name))
    try:
        with name_file(path):
            yield draft
            with draft.open("r+b") as file:  # Windows syncs only what is open for writing
                sync_file(file.fileno())
            draft.replace(path)
    except BaseException as error:
        with suppress(OSError):  # Windows removes no file that is still mapped
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(draft):
            error.filename = str(path)
        raise
    if hasattr(os, "O_DIRECTORY"):  # Windows cannot open a folder to sync it
        # Only a power failure could lose the new name; the file is complete under either.
        with suppress(OSError):
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def sync_file(number: int) -> None:
    """Write an open file to disk, where its file system can."""
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text in UTF-8; anything but a regular file is written to.

    Bytes of names that are not UTF-8 are written as escapes.
    """
    content = text.encode("utf-8", "backslashreplace")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with name_file(path):
            path.write_bytes(content)
        return
    with atomic_write(path) as draft:
        draft.write_bytes(content)


@contextmanager
def create_folder(path: Path) -> Generator[Path]:
    """Yield a new temporary folder; after the body, move it to `path`.

    If another process has created `path` in the meantime, that folder stays and ours is removed.
    """
    draft = path.with_name(f".{shorten_name(path.name, 240)}-{uuid4().hex[:8]}")
    draft.mkdir()
    try:
        with name_file(path):
            yield draft
        try:
            draft.rename(path)
        except OSError:
            if not path.exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
