"""Name the case and the cause when a sample fails or a data worker dies."""

import multiprocessing
import os
import re
import shutil
import signal
import threading
import traceback
from collections.abc import Generator, MutableSequence, Sequence
from contextlib import contextmanager
from errno import EAGAIN
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.errors import ADVICE, RunError, describe_os_error, get_advice
from unet3d.units import format_bytes

MAX_WORKERS = 1024
SHARED_MEMORY = Path("/dev/shm")
OOM_COUNTERS = (  # of this container: cgroup v2, cgroup v1
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)
NO_SHARED_MEMORY = (
    "unable to allocate shared memory",
    "unable to mmap",
    "unable to open shared memory object",
)
"""Errors of torch where shared memory is full or missing."""


class SampleError(RunError):
    """A sample could not be made; its message is one line even if a worker raised it.

    torch raises a worker's exception again with the traceback as its message; that becomes a note.
    """

    def __init__(self, message: str):
        *_, line = message.rpartition(f"{SampleError.__name__}: ")
        super().__init__(line.strip())
        if line != message:
            self.add_note(message)


class InFlightCases:
    """Record which case each worker started last, in memory that outlives the worker."""

    def __init__(self, volumes: Sequence[CachedVolume]):
        self.volumes = volumes
        self.started: MutableSequence[int]  # (pid, volume index) of each worker
        try:
            self.started = RawArray("q", 2 * MAX_WORKERS)
        except FileNotFoundError:  # Linux without /dev/shm, which cannot start workers either
            self.started = [0] * (2 * MAX_WORKERS)

    @contextmanager
    def __call__(self, index: int) -> Generator[None]:
        """Enter while making a sample of volume `index`; raise its errors as SampleError."""
        worker = get_worker_info()
        if worker is not None:
            slot = 2 * (worker.id % MAX_WORKERS)
            self.started[slot], self.started[slot + 1] = os.getpid(), index
        try:
            yield
        except Exception as error:
            volume = self.volumes[index]
            raise SampleError(
                f"{volume.name}: {find_damaged_file(volume) or format_one_line(error)}"
            ) from error

    def get_last(self, pids: Sequence[int]) -> list[CachedVolume]:
        """Return the volumes that these workers started last."""
        pairs = zip(self.started[::2], self.started[1::2], strict=True)
        return [self.volumes[index] for pid, index in pairs if pid in pids]


def exit_without_threads() -> None:
    """End a worker that cannot have its two threads; Python would print a traceback instead."""
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        os._exit(EAGAIN)
    done.set()


def send_error(queue: "Queue[Any]", error: Exception, item: Any) -> None:
    """Send why a batch of a worker cannot be sent, where Python would print it and drop the batch.

    The training process would wait for it. A private hook of Python 3.11 to 3.14.
    """
    if not isinstance(item, tuple):  # a part of it may have been sent
        os._exit(1)
    where = "in a DataLoader worker process"
    raised = (type(error), error, error.__traceback__)
    queue.put((item[0], ExceptionWrapper(raised, f"{where} {os.getpid()}")))


@contextmanager
def end_workers_on_error() -> Generator[None]:
    """Where the block fails, kill the daemon processes that it has started: the data workers.

    They ignore SIGTERM, and may hang: Python would wait for them at its exit.
    """
    others = multiprocessing.active_children()
    try:
        yield
    except BaseException as error:
        with hold_child_signals():  # torch would report their death
            for child in multiprocessing.active_children():
                if child.daemon and child not in others:
                    child.kill()
                    child.join()
        for frame, _ in traceback.walk_tb(error.__traceback__):
            iterator = frame.f_locals.get("self")
            if isinstance(iterator, _BaseDataLoaderIter):  # may be half built: its __del__ fails
                iterator._workers = []
        raise


@contextmanager
def hold_child_signals() -> Generator[None]:
    """Do without a handler of SIGCHLD; only the main thread has one.

    A handler that is not set in Python stays: it could not be set again.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "SIGCHLD") or signal.getsignal(signal.SIGCHLD) is None:
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


def find_damaged_file(volume: CachedVolume) -> str | None:
    """Describe the first file of a volume that is missing or damaged, and the fix."""
    for name in ("image", "label", "foreground_points"):
        path = volume.folder / f"{name}.npy"
        try:
            getattr(volume, name)  # maps the file, which fails if it is too short
        except FileNotFoundError:
            return f"{path} is missing; restart the run to regenerate it"
        except Exception as error:
            if isinstance(error, OSError) and get_advice(error):  # the file may be sound
                return describe_os_error(error, path)
            return (
                f"{path} cannot be read ({format_one_line(error)}); remove {volume.folder} and "
                "restart the run to regenerate it"
            )
    return None


def format_one_line(error: BaseException) -> str:
    """Format an exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def count_oom_kills() -> int:
    """Count the processes of this container that the kernel's out-of-memory killer has killed."""
    for path in OOM_COUNTERS:
        try:
            match = re.search(r"^oom_kill (\d+)", path.read_text("utf-8"), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match[1])
    return 0


def explain_worker_error(
    error: BaseException, in_flight: Sequence[InFlightCases], *, num_workers: int, kills_before: int
) -> RunError | None:
    """Explain a worker's death or exception in one line; None if the error is neither."""
    texts = list(iter_exception_texts(error))
    text = " ".join(texts)
    if any(phrase in text for phrase in NO_SHARED_MEMORY):
        return RunError(f"a data worker could not allocate shared memory: {explain_full_shm()}")
    raised = re.match(r"Caught \w+ in \w+ .*process \d+", texts[0])
    if raised:
        reason = texts[0].strip().splitlines()[-1]
        number = re.search(r"OSError: \[Errno (\d+)\]", reason)
        advice = number and ADVICE.get(int(number[1]))
        return RunError(f"a data worker failed: {reason}{f': {advice}' if advice else ''}")
    death = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", text)
    if not death:
        return None
    pids = [int(pid) for pid in death[1].split(",")]
    last = [volume for cases in in_flight for volume in cases.get_last(pids)]
    names = f" (last case: {', '.join(v.name for v in last)})" if last else ""
    cause = explain_death(text, last, num_workers=num_workers, kills_before=kills_before)
    return RunError(f"a data worker{names} {cause}")


def explain_death(
    text: str, last: Sequence[CachedVolume], *, num_workers: int, kills_before: int
) -> str:
    """Explain from torch's text why a worker died, and how to avoid it."""
    advice = f"lower data.num_workers (now {num_workers})"
    killed = re.search(r"killed by signal: ([^.]+)\.", text)
    if killed is None:
        code = re.search(r"exit code (\d+)", text)
        if code and int(code[1]) == EAGAIN:
            return f"could not start a thread: {ADVICE[EAGAIN]}"
        suffix = f" with exit code {code[1]}" if code else ""
        return f"exited{suffix}; rerun with data.num_workers=0 to see why"
    description = killed[1].strip()
    names = {signal.strsignal(number): number.name for number in signal.Signals}
    name = names.get(description, description)
    if name == "SIGKILL" and count_oom_kills() > kills_before:
        return f"was killed because the container ran out of memory: give it more, or {advice}"
    if name == "SIGKILL":
        return (
            "was killed by SIGKILL, usually because memory ran out: look at dmesg or the "
            f"scheduler's log, and {advice}"
        )
    if name == "SIGBUS":
        damaged = [(volume.name, find_damaged_file(volume)) for volume in last]
        problems = [f"{name}: {problem}" for name, problem in damaged if problem]
        return f"crashed with SIGBUS: {problems[0] if problems else explain_full_shm()}"
    return f"was killed by {name}; rerun with data.num_workers=0 to see whether the data causes it"


def explain_full_shm() -> str:
    """Explain that shared memory is full or missing, and how large it is."""
    fewer = "lower data.num_workers (0 needs none)"
    if not SHARED_MEMORY.is_dir():
        return f"there is no {SHARED_MEMORY}: {fewer}"
    usage = shutil.disk_usage(SHARED_MEMORY)
    return (
        f"{SHARED_MEMORY} is full ({format_bytes(usage.free)} of {format_bytes(usage.total)} are "
        "free now): give the container more (docker run --shm-size=8g or --ipc=host), or "
        f"{fewer}"
    )


def iter_exception_texts(error: BaseException | None) -> Generator[str]:
    """Yield the messages of an exception and of its causes."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__
