"""Describe this machine: cores, memory, GPUs, and the software that runs on them."""

import os
import platform
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.cuda.nccl

from unet3d.cpp_kernels import find_compiler
from unet3d.files import find_existing_dir
from unet3d.machine import (
    count_usable_cores,
    get_available_bytes,
    get_cpu_model,
    get_memory_limit,
    get_os_name,
    has_fast_bf16,
    read_meminfo,
)
from unet3d.training.preflight import SHM

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
    triton_compiler: str | None  # that it runs to build its launchers
    python_headers: bool  # which these include
    packages: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU that torch finds."""

    index: int
    name: str
    total: int
    free: int
    capability: tuple[int, int]


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
        cudnn=get_cudnn_version(),
        nccl=get_nccl_version(),
        driver=get_driver_version(),
        cpu_compiler=find_program(find_compiler()),
        triton_compiler=find_program(
            os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), None)
        ),
        python_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
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


def get_disk_space(folder: Path) -> DiskSpace:
    """Return the disk space where a folder is or would be created."""
    usage = shutil.disk_usage(find_existing_dir(folder))
    return DiskSpace(folder=str(folder), total=usage.total, free=usage.free)


def get_cudnn_version() -> str | None:
    """Return cuDNN's version with dots: 91002 is 9.10.2; None if torch does not take it."""
    try:
        number = torch.backends.cudnn.version()
    except RuntimeError:
        return None
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


def find_program(command: str | None) -> str | None:
    """Return the path of a command's program; None if it is not found."""
    return None if command is None else shutil.which(command.split()[0])


def get_package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
