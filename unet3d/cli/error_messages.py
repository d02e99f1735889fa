"""Turn an error into one line on standard error and an exit code."""

import sys
import traceback
from collections.abc import Sequence
from errno import EACCES, EAGAIN, EEXIST, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS
from types import TracebackType
from typing import Any

from unet3d.cli.output import is_output_lost
from unet3d.config.validate import CONFIG_ERRORS, format_config_error
from unet3d.data.findings import InvalidDatasetError
from unet3d.errors import (
    ADVICE,
    DoesNotFitError,
    EstimatedOutOfMemoryError,
    Interrupted,
    RunError,
    UsageError,
    describe_os_error,
    get_advice,
    lacks_memory,
)
from unet3d.units import format_bytes

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource: Any = None

EXIT_CODES: dict[type[BaseException], int] = {UsageError: 2, DoesNotFitError: 3, RunError: 4}

ONEDNN_FAILURES = ("could not execute a primitive", "could not create a primitive")
"""Messages of convolutions on a CPU that get no memory, or fail for another reason."""

NO_THREAD = "can't start new thread"
"""What Python says where the number of processes is limited, or their memory."""

PATH_ERRORS = (ENOENT, EACCES, EEXIST, EPERM, ENOTDIR, EISDIR, EROFS, ENAMETOOLONG, ELOOP)


class ErrorHandler:
    """A context that prints an error as one line; `code` is the exit code.

    Interrupting one job of a sweep interrupts the sweep; a job that is estimated not to fit is
    skipped.
    """

    def __init__(
        self,
        *,
        debug: bool,
        command: str = "train",
        args: Sequence[str] = (),
        sweeping: bool = False,
    ):
        self.debug, self.command, self.args, self.sweeping = debug, command, args, sweeping
        self.code = 0
        self.error: BaseException | None = None

    def __enter__(self) -> "ErrorHandler":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.error = error
        if isinstance(error, EstimatedOutOfMemoryError):
            print(f"skipped: {error}")
        elif isinstance(error, Interrupted | KeyboardInterrupt):
            if self.sweeping:
                return False
            is_reported = isinstance(error, Interrupted) and error.is_reported
            if not is_reported:
                print(f"unet3d: interrupted by {error or 'SIGINT'}", file=sys.stderr)
            self.code = error.exit_code if isinstance(error, Interrupted) else 130
        elif isinstance(error, BrokenPipeError) and is_output_lost():
            self.code = 1
        elif isinstance(error, Exception):
            if self.debug:
                traceback.print_exception(error)
            print(f"unet3d: {format_error(error, self.command, self.args)}", file=sys.stderr)
            self.code = get_exit_code(error)
        else:
            return error is None
        return True


def get_exit_code(error: Exception) -> int:
    """Return 2 for usage errors, 3 for out of memory, 4 for other errors."""
    if isinstance(error, CONFIG_ERRORS):
        return 2
    if isinstance(error, OSError) and error.errno in PATH_ERRORS:
        return 2
    if is_out_of_memory(error):
        return 3
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 4)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a GPU or the machine ran out of memory; torch is not imported for it."""
    if isinstance(error, UsageError | ModuleNotFoundError):
        return False
    is_of_library = isinstance(error, SystemError | ImportError) or str(error) in ONEDNN_FAILURES
    if (is_of_library or NO_THREAD in str(error)) and list_memory_limits():
        return True  # how libraries in C fail where memory is limited
    return lacks_memory(error)


def list_memory_limits() -> list[str]:
    """Return the limits that this process was started with."""
    if resource is None:
        return []
    limits = {
        "-v": resource.getrlimit(resource.RLIMIT_AS)[0],
        "-d": resource.getrlimit(resource.RLIMIT_DATA)[0],
    }
    return [
        f"ulimit {flag}, now {format_bytes(limit)}"
        for flag, limit in limits.items()
        if limit != resource.RLIM_INFINITY
    ]


def format_error(error: Exception, command: str, args: Sequence[str]) -> str:
    """Say in one line what went wrong."""
    if isinstance(error, CONFIG_ERRORS):
        return format_config_error(error, command, args)
    if isinstance(error, DoesNotFitError | InvalidDatasetError):
        return str(error)  # a report of several lines
    if NO_THREAD in str(error) and not list_memory_limits():
        return f"{' '.join(str(error).split())}: {ADVICE[EAGAIN]}"
    if isinstance(error, UsageError | RunError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and (error.filename is not None or get_advice(error)):
        return describe_os_error(error)
    text = " ".join(str(error).split()) or type(error).__name__
    if is_out_of_memory(error):
        raised = "".join(f"raise {limit}, or " for limit in list_memory_limits())
        return (
            f"out of memory: {text}: {raised}make data.patch_size, data.batch_size, the network "
            "(model.*) or the scan smaller"
        )
    return f"{type(error).__name__}: {text} (debug=true shows the traceback)"
