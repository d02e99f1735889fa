"""Faults while samples are made: whose they are, also when the worker that made one died."""

import os
import re
import shutil
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

from torch.utils.data import get_worker_info

from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.errors import RunError
from unet3d.units import format_bytes

MOST_WORKERS = 1024
SHARED_MEMORY = Path("/dev/shm")
OOM_COUNTERS = (  # of this container: cgroup 2, cgroup 1
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)
MORE_SHARED_MEMORY = (
    "/dev/shm is full ({}): give the container more (docker run --shm-size=8g, or --ipc=host), "
    "or use fewer data.num_workers (0 needs none)"
)


class SampleError(RunError):
    """A sample could not be made; one line also when it comes out of a worker.

    torch raises a worker's exception again with its traceback as the text: that becomes a note.
    """

    def __init__(self, said: str):
        *_, own = said.rpartition(f"{SampleError.__name__}: ")
        super().__init__(own.strip())
        if own != said:
            self.add_note(said)


class InFlightCases:
    """Which case each worker began last, in memory that outlives the worker."""

    def __init__(self, volumes: Sequence[CachedVolume]):
        self.volumes = volumes
        self.begun = RawArray("q", 2 * MOST_WORKERS)  # pid and number of the volume, by worker

    @contextmanager
    def __call__(self, number: int) -> Generator[None]:
        """Around the making of a sample of this volume."""
        worker = get_worker_info()
        if worker is not None:
            at = 2 * (worker.id % MOST_WORKERS)
            self.begun[at], self.begun[at + 1] = os.getpid(), number
        try:
            yield
        except Exception as error:
            volume = self.volumes[number]
            raise SampleError(
                f"{volume.name}: {find_damaged_file(volume) or format_one_line(error)}"
            ) from error

    def last(self, pids: Sequence[int]) -> list[CachedVolume]:
        """What these workers began last."""
        pairs = zip(self.begun[::2], self.begun[1::2], strict=True)
        return [self.volumes[number] for pid, number in pairs if pid in pids]


def find_damaged_file(volume: CachedVolume) -> str | None:
    """Which of a volume's files is gone or cut off, and what helps."""
    for name in ("image", "label", "places"):
        path = volume.folder / f"{name}.npy"
        try:
            getattr(volume, name)  # maps the file, which must be as long as it says
        except FileNotFoundError:
            return f"{path} is gone: start again, and it is prepared anew"
        except Exception as error:
            return (
                f"{path} cannot be read ({format_one_line(error)}): remove {volume.folder} and start again, "
                "and it is prepared anew"
            )
    return None


def format_one_line(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def oom_kills() -> int:
    """How many processes of this container the kernel has killed for want of memory."""
    for path in OOM_COUNTERS:
        try:
            found = re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def explain_worker_error(
    error: BaseException, making: Sequence[InFlightCases], *, num_workers: int, kills_before: int
) -> RunError | None:
    """A worker's death, or what torch made of its exception, in one line; None: neither."""
    texts = list(iter_exception_texts(error))
    said = " ".join(texts)
    if "unable to allocate shared memory" in said or "unable to mmap" in said:
        return RunError(f"a data worker found no shared memory: {explain_full_shm()}")
    raised = re.match(r"Caught \w+ in \w+ .*process \d+", texts[0])
    if raised:
        return RunError(f"a data worker failed: {texts[0].strip().splitlines()[-1]}")
    died = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", said)
    if not died:
        return None
    pids = [int(pid) for pid in died[1].split(",")]
    last = [volume for some in making for volume in some.last(pids)]
    names = f" (the last case it began: {', '.join(v.name for v in last)})" if last else ""
    return RunError(
        f"a data worker{names} {explain_death(said, last, num_workers=num_workers, before=kills_before)}"
    )


def explain_death(said: str, last: Sequence[CachedVolume], *, num_workers: int, before: int) -> str:
    """What a worker died of, from torch's text, and what helps."""
    fewer = f"use fewer data.num_workers (now {num_workers})"
    killed = re.search(r"killed by signal: ([^.]+)\.", said)
    if killed is None:
        code = re.search(r"exit code (\d+)", said)
        how = f" with exit code {code[1]}" if code else ""
        return f"ended{how}; data.num_workers=0 shows why"
    named = {signal.strsignal(number): number for number in signal.valid_signals()}
    number = named.get(killed[1].strip())
    if number == signal.SIGKILL and oom_kills() > before:
        return f"was killed as the container's memory ran out: give it more, or {fewer}"
    if number == signal.SIGKILL:
        return (
            "was killed from outside (SIGKILL), most often as memory ran out: look at dmesg or "
            f"the scheduler's log, and {fewer}"
        )
    if number == signal.SIGBUS:
        files = [(volume.name, find_damaged_file(volume)) for volume in last]
        cut = [f"{name}: {what}" for name, what in files if what]
        return f"met a bus error: {cut[0] if cut else explain_full_shm()}"
    name = killed[1].strip() if number is None else signal.Signals(number).name
    return f"was ended by {name}; data.num_workers=0 shows whether it is the data"


def explain_full_shm() -> str:
    """That shared memory is, and how large."""
    if not SHARED_MEMORY.is_dir():
        return MORE_SHARED_MEMORY.format("it is missing")
    usage = shutil.disk_usage(SHARED_MEMORY)
    return MORE_SHARED_MEMORY.format(
        f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free now"
    )


def iter_exception_texts(error: BaseException | None) -> Generator[str]:
    """The texts of an exception and of those behind it."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__
