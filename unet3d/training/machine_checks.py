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

from unet3d.files import find_existing_dir
from unet3d.text import GIB, format_bytes

SHM = Path("/dev/shm")

PREFETCH = 2
"""Batches that each DataLoader worker loads ahead, all of them in shared memory."""

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


def describe_workers(workers: int, processes: int) -> str:
    """Return the number of workers of all processes on this machine, as text.

    >>> describe_workers(4, 1), describe_workers(4, 8)
    ('4 workers', '8 x 4 workers')
    """
    return f"{workers} workers" if processes == 1 else f"{processes} x {workers} workers"


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
