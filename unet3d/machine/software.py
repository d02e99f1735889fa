"""The software of this machine: torch, its libraries, compilers and packages."""

import os
import platform
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import torch
import torch.cuda.nccl

from unet3d import cpp_kernels

T = TypeVar("T")

PACKAGES = (
    *("lightning", "hydra-core", "monai", "tensorboard", "nibabel", "numpy", "scipy", "matplotlib"),
    *("triton",),
)


@dataclass(frozen=True, kw_only=True)
class Software:
    """Versions and paths of programs; what is missing is None."""

    python: str
    torch: str
    cuda: str | None  # version that torch is built for
    rocm: str | None
    cudnn: str | None
    nccl: str | None  # for distributed runs on GPUs; gloo is for CPUs
    gloo: bool
    architectures: tuple[str, ...]  # GPU architectures that torch has kernels for
    cpu_compiler: str | None
    cpu_openmp: bool | None  # whether that compiler has it; without, CPU kernels use one thread
    triton_compiler: str | None
    python_headers: bool
    packages: dict[str, str | None]


def inspect_software() -> Software:
    """Collect the versions and programs of this machine."""
    compiler = find_program(cpp_kernels.find_compiler())
    return Software(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        cudnn=call_or_none(get_cudnn_version),
        nccl=call_or_none(get_nccl_version),
        gloo=bool(call_or_none(torch.distributed.is_gloo_available)),
        architectures=tuple(call_or_none(torch.cuda.get_arch_list) or ()),
        cpu_compiler=compiler,
        cpu_openmp=None if compiler is None else cpp_kernels.supports_openmp(compiler),
        triton_compiler=find_program(get_triton_compiler()),
        python_headers=has_python_headers(),
        packages={name: get_package_version(name) for name in PACKAGES},
    )


def call_or_none(function: Callable[[], T]) -> T | None:
    """Return what a function returns; None if it fails, as on a machine with a broken driver."""
    try:
        return function()
    except Exception:
        return None


def get_cudnn_version() -> str | None:
    """Return cuDNN's version with dots: 91002 is 9.10.2, and before 9, 8902 is 8.9.2."""
    number = torch.backends.cudnn.version()
    if number is None:
        return None
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def get_nccl_version() -> str | None:
    """Return NCCL's version with dots."""
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


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
