"""Cores, memory, files and disks that this process may use; what is unknown is None."""

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from unet3d.atomic_write import find_existing_dir
from unet3d.machine import cgroups
from unet3d.machine.device import has_fast_bf16
from unet3d.machine.distributed_env import detect_launcher
from unet3d.machine.memory import get_available_bytes, read_meminfo
from unet3d.machine.preflight import SHM, get_file_limits

CPUINFO = Path("/proc/cpuinfo")

CONTAINER_FILES = {
    "docker": Path("/.dockerenv"),
    "podman": Path("/run/.containerenv"),
    "singularity": Path("/.singularity.d"),
}
"""Files by which container engines are recognized."""


@dataclass(frozen=True, kw_only=True)
class DiskSpace:
    """Total and free bytes of the file system of a folder."""

    folder: str
    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class KernelCache:
    """Compiled kernels in a folder, which may not exist yet."""

    folder: str
    files: int
    size: int  # bytes


@dataclass(frozen=True, kw_only=True)
class System:
    """Resources of this machine, in bytes unless they are counts."""

    name: str
    container: str | None  # the container engine, if detected
    launcher: str | None  # SLURM or torchrun, if it started this process
    cpu_model: str | None
    cores: int  # that this process may use
    total_cores: int | None
    cpu_quota: float | None  # CPU time limit of the container or job, in cores
    threads: int  # of torch
    fast_bf16: bool
    ram: int | None
    ram_free: int | None  # within the container's limit
    ram_limit: int | None
    swap: int | None
    swap_free: int | None
    shm: DiskSpace | None  # /dev/shm
    open_files: int | None
    max_open_files: int | None  # hard limit


def inspect_system() -> System:
    """Collect the resources of this machine."""
    memory = read_meminfo()
    soft, hard = get_file_limits() or (None, None)
    return System(
        name=get_os_name(),
        container=next((engine for engine, file in CONTAINER_FILES.items() if file.exists()), None),
        launcher=describe_launcher(),
        cpu_model=get_cpu_model(),
        cores=count_usable_cores(),
        total_cores=os.cpu_count(),
        cpu_quota=cgroups.get_cpu_quota(),
        threads=torch.get_num_threads(),
        fast_bf16=has_fast_bf16(),
        ram=memory.get("MemTotal"),
        ram_free=get_available_bytes(torch.device("cpu")),
        ram_limit=cgroups.get_memory_limit(),
        swap=memory.get("SwapTotal"),
        swap_free=memory.get("SwapFree"),
        shm=get_disk_space(SHM) if SHM.is_dir() else None,
        open_files=soft,
        max_open_files=hard,
    )


def get_os_name() -> str:
    """Return the operating system, its kernel and the machine type."""
    try:
        release = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):  # not Linux, or one without os-release
        release = " ".join(filter(None, ("macOS", platform.mac_ver()[0])))
        release = release if platform.system() == "Darwin" else ""
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    return ", ".join(filter(None, (release, kernel)))


def get_cpu_model(file: Path = CPUINFO) -> str | None:
    """Return the model name of the CPU."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or None


def count_usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_launcher(environ: Mapping[str, str] = os.environ) -> str | None:
    """Describe the launcher and the rank of this process; None without a launcher."""
    launcher = detect_launcher(environ)
    if launcher == "torchrun":
        return f"torchrun, rank {environ.get('RANK')} of {environ.get('WORLD_SIZE')}"
    if "SLURM_JOB_ID" not in environ:
        return None
    job = f"SLURM job {environ['SLURM_JOB_ID']}"
    if launcher is None:
        return f"{job}, not started by srun"
    return f"{job}, task {environ['SLURM_PROCID']} of {environ['SLURM_STEP_NUM_TASKS']}"


def inspect_kernel_cache(folder: Path, pattern: str) -> KernelCache:
    """Return how many compiled kernels a folder has."""
    sizes = [file.stat().st_size for file in folder.glob(pattern)]
    return KernelCache(folder=str(folder), files=len(sizes), size=sum(sizes))


def get_disk_space(folder: Path) -> DiskSpace:
    """Return the disk space where a folder is or would be created."""
    usage = shutil.disk_usage(find_existing_dir(folder))
    return DiskSpace(folder=str(folder), total=usage.total, free=usage.free)
