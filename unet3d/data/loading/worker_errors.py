"""Name the case and the cause when a sample fails or a data worker dies."""

import multiprocessing
import os
import re
import signal
import threading
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray

from torch.utils.data import get_worker_info

from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.errors import RunError, describe_os_error

MAX_WORKERS = 1024

FULL_SHM = (
    "/dev/shm is full or missing: give the container more (docker run --shm-size=8g or --ipc=host),"
    " or lower data.num_workers (0 needs none)"
)
NO_SHARED_MEMORY = (
    "unable to allocate shared memory",
    "unable to mmap",
    "unable to open shared memory object",
)
"""Errors of torch where shared memory is full or missing."""


class SampleError(RuntimeError):
    """A sample could not be made; the message names its case."""


class InFlightCases:
    """Record which case each worker started last, in memory that outlives the worker."""

    def __init__(self, volumes: Sequence[CachedVolume]):
        self.volumes = volumes
        self.started = RawArray("q", 2 * MAX_WORKERS)  # (pid, volume index) of each worker

    @contextmanager
    def __call__(self, index: int) -> Generator[None]:
        """Enter while making a sample of volume `index`; raise its errors as SampleError."""
        worker, name = get_worker_info(), self.volumes[index].name
        if worker is not None:
            slot = 2 * (worker.id % MAX_WORKERS)
            self.started[slot], self.started[slot + 1] = os.getpid(), index
        try:
            yield
        except OSError as error:
            raise SampleError(f"{name}: {describe_os_error(error)}") from error
        except Exception as error:
            text = " ".join(str(error).split())
            raise SampleError(f"{name}: {type(error).__name__}: {text}") from error


@contextmanager
def end_workers_on_error() -> Generator[None]:
    """Where the block fails, kill the daemon processes that it has started: the data workers.

    They ignore SIGTERM, and may hang: Python would wait for them at its exit.
    """
    others = multiprocessing.active_children()
    try:
        yield
    except BaseException:
        # torch's handler would report their death; only the main thread of a POSIX system has it.
        is_main = threading.current_thread() is threading.main_thread()
        has_handler = is_main and hasattr(signal, "SIGCHLD")
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if has_handler else None
        for child in multiprocessing.active_children():
            if child.daemon and child not in others:
                child.kill()
                child.join()
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)
        raise


def explain_worker_error(
    error: BaseException, in_flight: Sequence[InFlightCases], *, num_workers: int
) -> RunError | None:
    """Explain a worker's death or the exception of a sample in one line; None for other errors.

    torch raises a worker's exception again with the traceback as its message.
    """
    if isinstance(error, SampleError):
        return RunError(str(error).rpartition(f"{SampleError.__name__}: ")[2].strip())
    text = "".join(traceback.format_exception(error))  # with its causes: torch hides them
    if any(phrase in text for phrase in NO_SHARED_MEMORY):
        return RunError(f"a data worker could not allocate shared memory: {FULL_SHM}")
    if re.match(r"Caught \w+ in \w+ .*process \d+", str(error)):
        return RunError(f"a data worker failed: {str(error).strip().splitlines()[-1]}")
    death = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", text)
    if not death:
        return None
    pids = [int(pid) for pid in death[1].split(",")]
    last = [
        cases.volumes[index].name
        for cases in in_flight
        for pid, index in zip(cases.started[::2], cases.started[1::2], strict=True)
        if pid in pids
    ]
    names = f" (last case: {', '.join(last)})" if last else ""
    killed = re.search(r"killed by signal: ([^.]+)\.", text)
    name = killed[1].strip() if killed else None
    if name == signal.strsignal(signal.SIGKILL):
        cause = "was killed by SIGKILL, usually because memory ran out: lower data.num_workers "
        cause += f"(now {num_workers})"
    elif name == signal.strsignal(signal.SIGBUS):
        cause = f"crashed with SIGBUS: {FULL_SHM}"
    else:
        how = f"was killed by a signal ({name})" if killed else "exited"
        cause = f"{how}; rerun with data.num_workers=0 to see why"
    return RunError(f"a data worker{names} {cause}")
