"""Write files atomically, read JSON, lock a file, and find the folder of compiled kernels."""

import errno
import json
import logging
import os
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

TRAINING_FILES = ("report.json", "curves.json")
"""What training writes, and no evaluation."""


def find_existing_dir(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


@contextmanager
def add_path_to_errors(path: Path) -> Generator[None]:
    """Add the path to errors of reading or writing the file that do not name it.

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


def make_temporary_path(path: Path) -> Path:
    """Return an unused name beside a path, with the same ending: writers choose a format by it."""
    return path.with_name(f".{uuid4().hex[:8]}-{path.name[-60:]}")  # at most 255 bytes


def remove_temporary_files(path: Path) -> None:
    """Remove what killed processes were writing to `path`, or to all that match, as in *.ckpt.

    The caller makes sure that no other process is writing there.
    """
    pattern = escape(path.name[-60:]).replace("[*]", "*")
    for draft in path.parent.glob(f".{8 * '[0-9a-f]'}-{pattern}"):
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Generator[Path]:
    """Yield a temporary path; after the body, sync it to disk and move it to `path`.

    After a crash the file is the old one or the new one, never a part. If the body raises, the
    temporary file is removed.
    """
    draft = make_temporary_path(path)
    try:
        with add_path_to_errors(path):
            yield draft
            with draft.open("r+b") as file:  # Windows syncs only what is open for writing
                os.fsync(file.fileno())
            draft.replace(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(draft):
            error.filename = str(path)
        raise


def replace_with_copy(path: Path, target: Path) -> None:
    """Replace `target` by a hard link to `path`, or a copy; `path` exists at any time."""
    link = make_temporary_path(target)
    try:
        try:
            os.link(path, link)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(path, link)
        link.replace(target)
    finally:
        link.unlink(missing_ok=True)  # replace() keeps it if both are already the same file


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text in UTF-8; /dev/stdout and links are written to instead.

    Its folder is created. Bytes of names that are not UTF-8 are written as escapes.
    """
    content = text.encode("utf-8", "backslashreplace")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        draft.write_bytes(content)


def write_output(text: str, path: Path | None) -> None:
    """Print to standard output, or write to a file.

    A result whose reader has seen enough, as in `unet3d memory view=layers | head -1`, is no error.
    """
    if path is not None:
        write_text(path, text + "\n")
        return
    is_unread(text)


def is_unread(text: str = "") -> bool:
    """Print to standard output; return whether nobody reads it any more."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # let the interpreter's last flush succeed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def write_figure(figure: Any, path: Path, *, dpi: int = 110) -> None:
    """Write a figure of matplotlib as PNG; its folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=dpi, format="png")


@contextmanager
def create_folder(path: Path) -> Generator[Path]:
    """Yield a new temporary folder; after the body, move it to `path`.

    If another process has created `path` in the meantime, that folder stays and ours is removed.
    """
    draft = make_temporary_path(path)
    draft.mkdir()
    try:
        with add_path_to_errors(path):
            yield draft
        try:
            draft.rename(path)
        except OSError:
            if not path.exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; what is wrong with it is an OSError or a ValueError."""
    return json.loads(path.read_text("utf-8-sig"))  # editors on Windows write such a mark


def find_run_checkpoint(folder: Path) -> Path | None:
    """Return the best or else last checkpoint of a run, if there is one."""
    files = (folder / "checkpoints" / name for name in ("best.ckpt", "last.ckpt"))
    return next((file for file in files if file.is_file()), None)


def read_report(folder: Path) -> dict[str, Any]:
    """Return report.json of a run's folder; nothing if it has none that can be read."""
    with suppress(OSError, ValueError):
        return read_json(folder / "report.json")
    return {}


@contextmanager
def lock_file(path: Path, timeout: float = -1) -> Generator[bool]:
    """Hold the lock of a path, whose file is removed afterwards; others wait, or raise Timeout.

    The system releases the lock when the process ends, however it ends. Yield whether it is held:
    where the file system has no locks, a warning says so.
    """
    from filelock import FileLock  # takes 40 ms, which most commands do not need

    lock = FileLock(path, timeout=timeout)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        _warn_without_locks(path.parent, error.strerror)
    try:
        yield lock.is_locked
    finally:
        with suppress(OSError):  # Windows removes no open file
            path.unlink()
        lock.release()


@cache
def _warn_without_locks(folder: Path, reason: str) -> None:
    """Say once per folder that nothing protects it from a second command."""
    logging.getLogger(__name__).warning(
        f"{folder} cannot be locked ({reason}): run one command at a time that writes "
        "there, or use a folder on another file system"
    )


def create_kernel_folder(name: str) -> Path:
    """Create a folder of compiled kernels for this user alone, and return it.

    Where several users share `$XDG_CACHE_HOME`, as in a container, each has a folder of their own.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    shared = hasattr(os, "geteuid") and find_existing_dir(base).stat().st_uid != os.geteuid()
    folder = base / (f"unet3d-{os.geteuid()}" if shared else "unet3d") / name
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
