"""Checks of this machine before a run computes anything.

Each check gets the numbers, or the folder to look at, and returns a Problem or None.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from unet3d.files import find_existing_dir
from unet3d.units import GIB, MIB, format_bytes

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource: Any = None

SHM = Path("/dev/shm")

PREFETCH = 2
"""Batches that each DataLoader worker loads ahead, all of them in shared memory."""

WORKER_BYTES = 64 * MIB
"""RAM of a worker besides its batches: 14 MiB at first, more as it touches its parent's pages."""

COPIES = 8
"""Peak RAM of a worker in batches, measured with every augmentation on."""

BASE_FILES, FILES_PER_WORKER = 128, 16
"""Open files of a run, and of each worker: pipes, and a descriptor per tensor in transit."""

MAX_CHECKPOINTS = 4
"""Checkpoints on disk at a time: best, last, previous, and the one being written."""


@dataclass(frozen=True)
class Problem:
    """What is wrong or too small, and what to change; with `is_fatal` a run is certain to fail."""

    message: str
    is_fatal: bool = False


def list_nvidia_devices() -> list[Path]:
    """Return the device files of NVIDIA GPUs, whether torch finds them or not."""
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def check_torch_build(version: str, *, cuda: str | None, devices: Sequence[Path]) -> Problem | None:
    """Say why torch, built for CUDA `cuda`, may find none of the GPUs that have device files."""
    if not devices:
        return None
    if cuda is None:
        return Problem(
            f"torch {version} was built without CUDA, but the machine has an NVIDIA GPU "
            f"({devices[0]}): install a CUDA build"
        )
    return Problem(
        f"torch {version}, built for CUDA {cuda}, finds no GPU, but the machine has one "
        f"({devices[0]}): check that nvidia-smi works and that the driver is new enough"
    )


def check_gpu_arch(
    version: str, architectures: Sequence[str], *, gpu: str, capability: tuple[int, int]
) -> Problem | None:
    """Check that torch has kernels for a GPU's architecture."""
    if has_kernels(architectures, capability):
        return None
    major, minor = capability
    return Problem(
        f"torch {version} has no kernels for {gpu} (sm_{major}{minor}), only for "
        f"{', '.join(architectures)}: install a build for this GPU",
        is_fatal=True,
    )


def has_kernels(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether a GPU can run the kernels: sm_ on its own major version, PTX on later ones.

    >>> has_kernels(["sm_80", "sm_90"], (8, 6)), has_kernels(["sm_80", "sm_90"], (7, 0))
    (True, False)
    >>> has_kernels(["sm_90", "compute_90"], (12, 0))
    True
    """
    for name in architectures:
        kind, _, digits = name.partition("_")
        if not digits.isdigit():
            continue  # sm_90a: architecture-specific kernels
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and (major, minor) <= capability:
            return True
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
    return not architectures  # unknown


def get_free_shm() -> int | None:
    """Return the free bytes of shared memory; None on systems that need no folder for it."""
    if SHM.is_dir():
        return shutil.disk_usage(SHM).free
    return 0 if sys.platform == "linux" else None


def check_shm(*, workers: int, processes: int, batch: int, free: int | None) -> Problem | None:
    """Check shared memory for the workers' batches; too little kills workers with SIGBUS."""
    needed = processes * workers * PREFETCH * batch
    if free is None or needed <= free:
        return None
    return Problem(
        f"{SHM} has {format_bytes(free)} left, but the batches of "
        f"{describe_workers(workers, processes)} need {format_bytes(needed)}: start the container "
        f"with --shm-size={ceil(1.25 * needed / GIB)}g or use data.num_workers=0",
        is_fatal=True,
    )


def check_worker_ram(
    *, workers: int, processes: int, batch: int, free: int | None
) -> Problem | None:
    """Check RAM for the workers' own memory; volumes are mapped from disk and do not count."""
    bytes_per_worker = processes * (WORKER_BYTES + COPIES * batch)
    needed = workers * bytes_per_worker
    if free is None or needed <= free:
        return None
    return Problem(
        f"{describe_workers(workers, processes)} need about {format_bytes(needed)} of RAM, "
        f"{format_bytes(free)} is free: use data.num_workers={free // bytes_per_worker}"
    )


def describe_workers(workers: int, processes: int) -> str:
    """Return the number of workers of all processes on this machine, as text.

    >>> describe_workers(4, 1), describe_workers(4, 8)
    ('4 workers', '8 x 4 workers')
    """
    return f"{workers} workers" if processes == 1 else f"{processes} x {workers} workers"


def raise_open_file_limit(workers: int) -> None:
    """Raise the soft limit of open files to what data workers need, at most to the hard limit."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BASE_FILES + workers * FILES_PER_WORKER
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_writable(folder: Path) -> Problem | None:
    """Check that files can be created in the folder, or the folder in its parent."""
    existing = find_existing_dir(folder)
    try:
        with TemporaryFile(dir=existing):
            return None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        return Problem(f"{existing} is not writable: {reason}", is_fatal=True)


def check_disk(folder: Path, *, checkpoint: int) -> Problem | None:
    """Check disk space for a run's checkpoints; existing ones will be replaced."""
    free = shutil.disk_usage(find_existing_dir(folder)).free
    replaceable = sum(file.stat().st_size for file in folder.glob("*.ckpt"))
    needed = MAX_CHECKPOINTS * checkpoint
    if needed <= free + replaceable:
        return None
    return Problem(
        f"{folder} has {format_bytes(free)} left, but checkpoints need {format_bytes(needed)} "
        f"({MAX_CHECKPOINTS} of {format_bytes(checkpoint)}: best, last, previous and the one being "
        "written): set hydra.run.dir= to another disk",
        is_fatal=True,
    )
