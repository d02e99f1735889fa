"""Which torch computes here, and what compiles kernels for it."""

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
    """Versions, and commands; None is what is not there."""

    python: str
    torch: str
    cuda: str | None  # that torch is built for
    rocm: str | None
    cudnn: str | None
    nccl: str | None  # with it GPUs share a run, with gloo CPUs
    gloo: bool
    architectures: tuple[str, ...]  # of GPUs that torch has kernels for
    cpu_compiler: str | None
    triton_compiler: str | None
    python_headers: bool
    packages: dict[str, str | None]


def inspect_software() -> Software:
    """Ask for all of it."""
    return Software(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        cudnn=call_or_none(cudnn),
        nccl=call_or_none(nccl),
        gloo=bool(call_or_none(torch.distributed.is_gloo_available)),
        architectures=tuple(call_or_none(torch.cuda.get_arch_list) or ()),
        cpu_compiler=find_program(cpp_kernels.compiler()),
        triton_compiler=find_program(triton_compiler()),
        python_headers=python_headers(),
        packages={name: get_package_version(name) for name in PACKAGES},
    )


def call_or_none(question: Callable[[], T]) -> T | None:
    """The answer; None where asking fails: a doctor sees machines on which something is broken."""
    try:
        return question()
    except Exception:
        return None


def cudnn() -> str | None:
    """Its version with dots.

    9.10.2 is 91002, and what came before 9 had a digit less: 8.9.2 is 8902.
    """
    number = torch.backends.cudnn.version()
    if number is None:
        return None
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def nccl() -> str | None:
    """Its version with dots."""
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def triton_compiler() -> str | None:
    """The command that Triton starts for what calls its kernels."""
    return os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), None)


def python_headers() -> bool:
    """Whether C can be compiled against this Python, as Triton does."""
    return (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


def find_program(command: str | None) -> str | None:
    """Where a command lies."""
    return None if command is None else shutil.which(command.split()[0])


def get_package_version(name: str) -> str | None:
    """The version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
