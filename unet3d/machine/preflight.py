"""What this machine lacks for a run, found before the run computes anything.

Every function is given the numbers, or the place to look at, and answers with a Lack or None.
"""

import os
import resource
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from tempfile import TemporaryFile

from unet3d.cpp_kernels import allows_exec
from unet3d.units import GIB, MIB, format_bytes

SHM = Path("/dev/shm")

PREFETCH = 2
"""Batches that DataLoader has each worker make ahead, all of them in shared memory."""

WORKER = 64 * MIB
"""What a worker has of its own, with pages of its parent that it touched: 14 MiB at first."""

COPIES = 8
"""Times the bytes of a batch that a worker held while it made one, with every augmentation on."""

FILES, FILES_PER_WORKER = 128, 16
"""Open files of a run, and for each worker: pipes, and a descriptor for each tensor in flight."""

KEPT = 4
"""Checkpoints at a time: best, last, the last one before, and the draft of another."""


@dataclass(frozen=True)
class Problem:
    """What there is too little of, and what to change; `stop`: a run would fail for sure."""

    what: str
    stop: bool = False


def check_torch_build(
    version: str, *, cuda: str | None, gpu: bool, half: bool, devices: Iterable[Path]
) -> Problem | None:
    """Whether this torch fits this machine: `cuda` it is built for, `gpu` whether it finds one."""
    if version.startswith("2.9."):
        what = (
            f"torch {version} runs half-precision 3D convolutions without cuDNN, in 3 to 17 times "
            "the memory (pytorch#166122): install torch>=2.10"
        )
        return Problem(what, stop=gpu and half)
    there = next(iter(devices), None)
    if gpu or there is None:
        return None
    if cuda is None:
        return Problem(
            f"torch {version} is built without CUDA, but {there} is there: install one with"
        )
    return Problem(
        f"torch {version} is built for CUDA {cuda} and finds no GPU, but {there} is there: look "
        "whether nvidia-smi works, and whether the driver is new enough"
    )


def check_gpu_arch(
    version: str, architectures: Sequence[str], *, gpu: str, capability: tuple[int, int]
) -> Problem | None:
    """Whether torch has kernels for a GPU of that generation."""
    if has_kernels(architectures, capability):
        return None
    major, minor = capability
    return Problem(
        f"torch {version} has no kernels for {gpu} (sm_{major}{minor}), but for "
        f"{', '.join(architectures)}: install a torch that was built for it",
        stop=True,
    )


def has_kernels(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Machine code serves its own generation, PTX (compute_) every later one.

    >>> has_kernels(["sm_80", "sm_90"], (8, 6)), has_kernels(["sm_80", "sm_90"], (7, 0))
    (True, False)
    >>> has_kernels(["sm_90", "compute_90"], (12, 0))
    True
    """
    for word in architectures:
        kind, _, digits = word.partition("_")
        if not digits.isdigit():
            continue  # sm_90a: kernels that no other GPU runs
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and (major, minor) <= capability:
            return True
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
    return not architectures  # it does not tell


def check_driver(cuda: str | None, *, driver: str | None, runs: str | None) -> Problem | None:
    """Whether a driver that `runs` that CUDA at most can serve a torch built for `cuda`."""
    if cuda is None or runs is None or int(runs.split(".")[0]) >= int(cuda.split(".")[0]):
        return None
    return Problem(
        f"driver {driver} runs CUDA {runs} at most, and torch is built for CUDA {cuda}: update the "
        f"driver, or install a torch for CUDA {runs.split('.')[0]}"
    )


def check_triton(installed: str | None, *, compiler: str | None, headers: bool) -> Problem | None:
    """Whether poolings and lean blocks have their kernels on a GPU."""
    if installed is None:
        return Problem(
            "Triton is not installed: poolings and lean blocks run in plain torch, slowly"
        )
    missing = [] if compiler else ["a C compiler (gcc, or CC=...)"]
    missing += [] if headers else ["Python's headers (python3-dev)"]
    if not missing:
        return None
    return Problem(
        f"Triton {installed} compiles its kernels when they are first run: install "
        + " and ".join(missing)
    )


def nvidia_devices(folder: Path = Path("/dev")) -> list[Path]:
    """The GPUs that the system shows, whatever torch says."""
    return sorted(folder.glob("nvidia[0-9]*"))


def get_free_shm(folder: Path = SHM) -> int | None:
    """What is left for tensors that processes share; None where the system has no such folder."""
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def check_shm(*, workers: int, processes: int, batch: int, free: int | None) -> Problem | None:
    """Room for the batches that workers have ready; without it they die of a bus error."""
    needed = processes * workers * PREFETCH * batch
    if free is None or needed <= free:
        return None
    return Problem(
        f"{SHM} has {format_bytes(free)} left, and {describe_workers(workers, processes)} put {format_bytes(needed)} of "
        f"batches there: start the container with --shm-size={ceil(1.25 * needed / GIB)}g, or give "
        "data.num_workers=0",
        stop=True,
    )


def check_worker_ram(
    *, workers: int, processes: int, batch: int, free: int | None
) -> Problem | None:
    """RAM for what workers hold of their own: volumes are mapped from disk and do not count."""
    each = processes * (WORKER + COPIES * batch)
    if free is None or workers * each <= free:
        return None
    fewer = free // each
    return Problem(
        f"{describe_workers(workers, processes)} take about {format_bytes(workers * each)} of RAM, "
        f"{format_bytes(free)} are free: data.num_workers={fewer} would do"
    )


def describe_workers(workers: int, processes: int) -> str:
    """The workers of all of a run's processes on this machine.

    >>> describe_workers(4, 1), describe_workers(4, 8)
    ('4 workers', '8 x 4 workers')
    """
    return f"{workers} workers" if processes == 1 else f"{processes} x {workers} workers"


def check_open_files(workers: int, *, hard: int) -> Problem | None:
    """Whether a process may open what loaders need; `allow_open_files` makes use of the limit."""
    needed = FILES + workers * FILES_PER_WORKER
    if hard >= needed:
        return None
    fewer = max(0, hard - FILES) // FILES_PER_WORKER
    return Problem(
        f"{workers} workers need about {needed} open files, and no more than {hard} are allowed: "
        f"raise the limit (ulimit -Hn), or give data.num_workers={fewer}"
    )


def file_limits() -> tuple[int, int]:
    """How many files this process may open, and what it may raise that to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return parse_limit(soft), parse_limit(hard)


def parse_limit(limit: int) -> int:
    """A limit as a number that can be compared."""
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def allow_open_files(workers: int) -> None:
    """Raise the soft limit as far as loaders need, if the hard one lets it."""
    soft, hard = file_limits()
    needed = min(FILES + workers * FILES_PER_WORKER, hard)
    if soft < needed:
        _, as_it_is = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, as_it_is))


def find_existing_dir(folder: Path) -> Path:
    """The folder, or the one above it that there is."""
    return next(f for f in (folder.absolute(), *folder.absolute().parents) if f.exists())


def check_writable(folder: Path) -> Problem | None:
    """Whether files can be made in the folder, or it in the one above."""
    where = find_existing_dir(folder)
    try:
        with TemporaryFile(dir=where):
            return None
    except OSError as error:
        return Problem(f"{where} cannot be written to: {os.strerror(error.errno or 0)}", stop=True)


def check_triton_cache(folder: Path) -> Problem | None:
    """Whether what Triton compiles can be kept in the folder, and loaded from it."""
    lack = check_writable(folder)
    reason = lack and lack.what
    if lack is None and not allows_exec(find_existing_dir(folder)):
        reason = f"{find_existing_dir(folder)} is mounted noexec"
    if reason is None:
        return None
    return Problem(
        f"{reason}, and Triton compiles into it: TRITON_CACHE_DIR= names another", stop=True
    )


def triton_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Where Triton keeps what it compiles."""
    home = Path(environ.get("TRITON_HOME") or Path.home())
    return Path(environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def check_disk(folder: Path, *, checkpoint: int) -> Problem | None:
    """Room for the checkpoints that a run keeps; those that are there make way for new ones."""
    free = shutil.disk_usage(find_existing_dir(folder)).free
    there = sum(file.stat().st_size for file in folder.glob("*.ckpt"))
    needed = KEPT * checkpoint
    if needed <= free + there:
        return None
    return Problem(
        f"{folder} has {format_bytes(free)} left, and checkpoints take {format_bytes(needed)} ({KEPT} of "
        f"{format_bytes(checkpoint)}: best, last, the one before, a draft): give hydra.run.dir= elsewhere",
        stop=True,
    )
