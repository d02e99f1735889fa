"""Describe this machine: cores, memory, GPUs, and the software that runs on them."""

import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.cuda.nccl

from unet3d.cpp_kernels import find_compiler
from unet3d.files import find_existing_dir
from unet3d.machine.device import has_fast_bf16
from unet3d.machine.memory import get_available_bytes, get_memory_limit, read_meminfo
from unet3d.machine.preflight import SHM
from unet3d.units import format_bytes

T = TypeVar("T")

CPUINFO = Path("/proc/cpuinfo")

PACKAGES = (
    *("lightning", "hydra-core", "monai", "tensorboard", "nibabel", "numpy", "scipy", "matplotlib"),
    *("triton",),
)


@dataclass(frozen=True, kw_only=True)
class DiskSpace:
    """Total and free bytes of the file system of a folder."""

    folder: str
    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class System:
    """Resources of this machine, in bytes unless they are counts; what is unknown is None."""

    name: str
    cpu_model: str | None
    cores: int  # that this process may use
    threads: int  # of torch
    fast_bf16: bool
    ram: int | None
    ram_free: int | None  # within the limit
    ram_limit: int | None  # of the container or batch job
    shm: DiskSpace | None  # /dev/shm


@dataclass(frozen=True, kw_only=True)
class Software:
    """Versions and paths of programs; what is missing is None."""

    python: str
    torch: str
    cuda: str | None  # version that torch is built for
    rocm: str | None
    cudnn: str | None
    nccl: str | None  # for distributed runs on GPUs
    driver: str | None  # NVIDIA's
    cpu_compiler: str | None
    triton_compiler: str | None
    python_headers: bool
    packages: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU that torch finds."""

    index: int
    name: str
    total: int
    free: int
    capability: tuple[int, int]


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions of what runs on it; no names of users or folders."""
    software, cuda = inspect_software(), device.type == "cuda"
    gpu = list_gpus()[torch.cuda.current_device()] if cuda else None
    return {
        "device": device.type,
        "gpu": None if gpu is None else gpu.name,
        "capability": None if gpu is None else gpu.capability,
        "memory_bytes": None if gpu is None else gpu.total,
        "torch": software.torch,
        "cuda": software.cuda,
        "cudnn": software.cudnn,
        "triton": software.packages.get("triton"),
        "threads": torch.get_num_threads(),
    }


def summarize_machine() -> dict[str, str]:
    """Return system, processor, memory and GPUs for people to read; no names of users or hosts."""
    memory = read_meminfo().get("MemTotal")
    facts = {
        "system": get_os_name(),
        "processor": f"{get_cpu_model() or 'unknown'}, {count_usable_cores()} usable cores",
        "memory": None if memory is None else format_bytes(memory),
        "GPU": ", ".join(gpu.name for gpu in list_gpus()),
        "CUDA": torch.version.cuda,
    }
    return {name: fact for name, fact in facts.items() if fact}


def inspect_system() -> System:
    """Collect the resources of this machine."""
    return System(
        name=get_os_name(),
        cpu_model=get_cpu_model(),
        cores=count_usable_cores(),
        threads=torch.get_num_threads(),
        fast_bf16=has_fast_bf16(),
        ram=read_meminfo().get("MemTotal"),
        ram_free=get_available_bytes(torch.device("cpu")),
        ram_limit=get_memory_limit(),
        shm=get_disk_space(SHM) if SHM.is_dir() else None,
    )


def inspect_software() -> Software:
    """Collect the versions and programs of this machine."""
    return Software(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        cudnn=call_or_none(get_cudnn_version),
        nccl=call_or_none(get_nccl_version),
        driver=get_driver_version(),
        cpu_compiler=find_program(find_compiler()),
        triton_compiler=find_program(get_triton_compiler()),
        python_headers=has_python_headers(),
        packages={name: get_package_version(name) for name in PACKAGES},
    )


def list_gpus() -> list[Gpu]:
    """Return the GPUs that torch finds; none if their driver is broken."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        gpus.append(
            Gpu(index=index, name=properties.name, total=total, free=free, capability=capability)
        )
    return gpus


def call_or_none(function: Callable[[], T]) -> T | None:
    """Return what a function returns; None if it fails, as on a machine with a broken driver."""
    try:
        return function()
    except Exception:
        return None


def get_os_name() -> str:
    """Return the operating system, its kernel and the machine type."""
    try:
        release = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):  # not Linux, or one without os-release
        release = platform.platform(terse=True)
    return f"{release}, {platform.system()} {platform.release()} {platform.machine()}"


def get_cpu_model() -> str | None:
    """Return the model name of the CPU."""
    try:
        lines = CPUINFO.read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or None


def count_usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def get_disk_space(folder: Path) -> DiskSpace:
    """Return the disk space where a folder is or would be created."""
    usage = shutil.disk_usage(find_existing_dir(folder))
    return DiskSpace(folder=str(folder), total=usage.total, free=usage.free)


def get_cudnn_version() -> str | None:
    """Return cuDNN's version with dots: 91002 is 9.10.2."""
    number = torch.backends.cudnn.version()
    return None if number is None else f"{number // 10_000}.{number % 10_000 // 100}.{number % 100}"


def get_nccl_version() -> str | None:
    """Return NCCL's version with dots."""
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def get_driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(ended.stdout.splitlines()), None)


def get_triton_compiler() -> str | None:
    """Return the C compiler that Triton runs to build its launchers."""
    return os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), None)


def has_python_headers() -> bool:
    """Return whether C can be compiled against this Python, as Triton does."""
    return (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


def find_program(command: str | None) -> str | None:
    """Return the path of a command's program; None if it is not found."""
    return None if command is None else shutil.which(command.split()[0])


def get_package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
