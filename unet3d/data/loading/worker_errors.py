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


class WorkerCaseTracker:
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

    def find_cases(self, pids: Sequence[int]) -> list[str]:
        """Return the names of the cases that these workers started last."""
        pairs = zip(self.started[::2], self.started[1::2], strict=True)
        return [self.volumes[index].name for pid, index in pairs if pid in pids]


@contextmanager
def end_workers_on_error() -> Generator[None]:
    """Where the block fails, kill the daemon processes that it has started: the data workers.

    They ignore SIGTERM, and may hang: Python would wait for them at its exit.
    """
    others = multiprocessing.active_children()
    try:
        yield
    except BaseException:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and hasattr(signal, "SIGCHLD"):  # torch's handler would report their death
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in multiprocessing.active_children():
            if child.daemon and child not in others:
                child.kill()
                child.join()
        raise


def explain_worker_error(
    error: BaseException, in_flight: Sequence[WorkerCaseTracker], *, num_workers: int
) -> RunError | None:
    """Explain the exception of a sample or a worker's death in one line; None for other errors."""
    if isinstance(error, SampleError):  # a worker's has its traceback as its message
        return RunError(str(error).rpartition(f"{SampleError.__name__}: ")[2].strip())
    text = "".join(traceback.format_exception(error))  # with its causes: torch hides them
    if any(phrase in text for phrase in NO_SHARED_MEMORY):
        return RunError(f"a data worker could not allocate shared memory: {FULL_SHM}")
    death = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", text)
    if not death:
        return None
    pids = [int(pid) for pid in death[1].split(",")]
    last = [name for cases in in_flight for name in cases.find_cases(pids)]
    worker = f"a data worker (last case: {', '.join(last)})" if last else "a data worker"
    killed = re.search(r"killed by signal: ([^.]+)\.", text)
    name = killed[1].strip() if killed else None
    if name == signal.strsignal(signal.SIGKILL):
        return RunError(
            f"{worker} was killed by SIGKILL, usually because memory ran out: lower "
            f"data.num_workers (now {num_workers})"
        )
    if name == signal.strsignal(signal.SIGBUS):
        return RunError(f"{worker} crashed with SIGBUS: {FULL_SHM}")
    how = f"was killed by a signal ({name})" if name else "exited"
    return RunError(f"{worker} {how}; rerun with data.num_workers=0 to see why")
