"""Exceptions with exit codes, and errors of others as one line."""

import errno
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager

from unet3d.text import escape_unprintable


class UsageError(ValueError):
    """An invalid request: one line on what was expected and what was given. Exit code 2."""


class DoesNotFitError(RuntimeError):
    """The run does not fit into the device's memory. Exit code 3."""


class EstimatedOutOfMemoryError(DoesNotFitError):
    """The run is estimated not to fit; a sweep skips it."""


class RunError(RuntimeError):
    """A failure while running: NaN, a dead worker, a missing file. Exit code 4."""


class Interrupted(BaseException):
    """A signal to stop: Ctrl-C (exit code 130), or another one (exit code 143)."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.is_reported = False  # whether the user has been told
        self.exit_code = 130 if number == signal.SIGINT else 143


ADVICE = {
    errno.ENOSPC: "free space or inodes there (df -h, df -i), or choose another folder",
    errno.EROFS: "its file system is mounted read-only: choose another folder",
    errno.EACCES: "change its permissions, or choose another folder",
    errno.EPERM: "change its permissions, or choose another folder",
    errno.EEXIST: "remove or rename it, or choose another folder",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
if hasattr(errno, "EDQUOT"):  # Windows has neither
    ADVICE[errno.EDQUOT] = "free space in your quota there, or choose another folder"
    ADVICE[errno.ESTALE] = "mount its file system again, then run the command again"

OUT_OF_MEMORY_MESSAGES = (
    *("allocate memory", "std::bad_alloc", "CUDA out of memory", "Unable to allocate"),
    *("Storage size calculation overflowed", "array is too big"),
    "numel: integer multiplication overflow",
)
"""Parts of messages about memory that cannot be had, of torch, numpy, C++ and the system."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory cannot be had; torch is not imported for it."""
    is_named = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return is_named or any(sign in str(error) for sign in OUT_OF_MEMORY_MESSAGES)


def describe_os_error(error: OSError, path: str | os.PathLike[str] | None = None) -> str:
    """Say in one line which file failed, how, and what to do.

    >>> describe_os_error(OSError(errno.EPERM, "Not permitted", "a.nii"))
    'a.nii: Not permitted: change its permissions, or choose another folder'
    """
    file = error.filename if path is None else path
    name = None if file is None or isinstance(file, int) else escape_unprintable(os.fsdecode(file))
    advice = ADVICE.get(error.errno or 0)
    return ": ".join(filter(None, (name, error.strerror or str(error), advice)))


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    if isinstance(error, OSError) and error.errno is not None:
        return describe_os_error(error)
    if isinstance(error, KeyError):  # whose message is the key
        return f"KeyError: {error}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def explain_missing_packages(what: object, *packages: str) -> Generator[None]:
    """Import optional packages in the body; say how to install them where that fails."""
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"{what} needs {', '.join(packages)}: pip install {' '.join(packages)} "
            f"({summarize_error(error)})"
        ) from error
