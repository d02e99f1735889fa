"""What this machine has for a process, GPUs aside; None is what it does not tell."""

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from unet3d.machine import cgroups
from unet3d.machine.device import has_fast_bf16
from unet3d.machine.distributed_env import detect_launcher
from unet3d.machine.memory import get_available_bytes, meminfo
from unet3d.machine.preflight import SHM, file_limits, find_existing_dir

CPUINFO = Path("/proc/cpuinfo")

MARKS = {
    "docker": Path("/.dockerenv"),
    "podman": Path("/run/.containerenv"),
    "singularity": Path("/.singularity.d"),
}
"""Files that engines leave in their containers."""


@dataclass(frozen=True, kw_only=True)
class DiskSpace:
    """A place for files: how large it is, and what of it is free."""

    folder: str
    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class System:
    """Bytes, cores and files that a process may have."""

    name: str
    container: str | None  # the engine, where one is seen
    launcher: str | None  # SLURM or torchrun, if this process is theirs
    processor: str | None
    cores: int  # that this process may use
    cores_there: int | None
    cores_limit: float | None  # so many cores' worth of time, by a container's or a job's limit
    threads: int  # that torch computes on
    fast_bf16: bool
    ram: int | None
    ram_free: int | None  # under a container's limit, too
    ram_limit: int | None
    swap: int | None
    swap_free: int | None
    shared: DiskSpace | None  # /dev/shm
    open_files: int
    open_files_most: int  # that the limit may be raised to


def inspect_system() -> System:
    """Ask for all of it; nothing is changed."""
    memory = meminfo()
    soft, hard = file_limits()
    return System(
        name=get_os_name(),
        container=next((engine for engine, mark in MARKS.items() if mark.exists()), None),
        launcher=launcher(),
        processor=get_cpu_model(),
        cores=count_usable_cores(),
        cores_there=os.cpu_count(),
        cores_limit=cgroups.get_cpu_quota(),
        threads=torch.get_num_threads(),
        fast_bf16=has_fast_bf16(),
        ram=memory.get("MemTotal"),
        ram_free=get_available_bytes(torch.device("cpu")),
        ram_limit=cgroups.memory_limit(),
        swap=memory.get("SwapTotal"),
        swap_free=memory.get("SwapFree"),
        shared=get_disk_space(SHM) if SHM.is_dir() else None,
        open_files=soft,
        open_files_most=hard,
    )


def get_os_name() -> str:
    """The system, its kernel and its kind of processor."""
    try:
        release = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):  # not Linux, or a bare one
        release = " ".join(filter(None, ("macOS", platform.mac_ver()[0])))
        release = release if platform.system() == "Darwin" else ""
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    return ", ".join(filter(None, (release, kernel)))


def get_cpu_model(file: Path = CPUINFO) -> str | None:
    """Its maker's name for it."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return platform.processor() or None
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None) or platform.processor() or None


def count_usable_cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launcher(environ: Mapping[str, str] = os.environ) -> str | None:
    """Who started this process, and which of its processes it is."""
    starter = detect_launcher(environ)
    if starter == "torchrun":
        return f"torchrun, rank {environ.get('RANK')} of {environ.get('WORLD_SIZE')}"
    if "SLURM_JOB_ID" not in environ:
        return None
    job = f"SLURM job {environ['SLURM_JOB_ID']}"
    if starter is None:
        return f"{job}, not a task of srun"
    return f"{job}, task {environ['SLURM_PROCID']} of {environ['SLURM_STEP_NUM_TASKS']}"


def get_disk_space(folder: Path) -> DiskSpace:
    """Where a folder is, or would be."""
    usage = shutil.disk_usage(find_existing_dir(folder))
    return DiskSpace(folder=str(folder), total=usage.total, free=usage.free)
