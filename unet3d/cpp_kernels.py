"""Compile C++ kernels for this machine on first use and cache the libraries.

C++ rather than torch.compile: one compilation of a few seconds covers every size and layout of a
dtype, and odd sizes are as fast as even ones.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from unet3d.control_groups import read_lines
from unet3d.files import atomic_write, create_kernel_folder

log = logging.getLogger(__name__)

CPP_TYPES = {torch.float32: "float", torch.bfloat16: "Bf16", torch.float16: "_Float16"}
HEADERS = Path(__file__).parent / "cpp"  # for all kernels
MIN_PARALLEL_ELEMENTS = 1 << 15


def find_compiler() -> str | None:
    """Return the C++ compiler: $CXX, or the first of g++, clang++ and c++; None without one."""
    return os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)


class CppKernels:
    """A C++ source file and its headers, compiled to one library per dtype."""

    def __init__(self, source: Path, name: str):
        self.source, self.name = source, name
        self.libraries: dict[torch.dtype, ctypes.CDLL | None] = {}

    def supports(self, x: Tensor) -> bool:
        """Return whether the kernels take x, of any size: plain PyTorch rounds differently.

        So a step has the same bits whatever its process has computed before.
        """
        is_known = x.device.type == "cpu" and x.dtype in CPP_TYPES
        return is_known and self.library(x.dtype) is not None

    def library(self, dtype: torch.dtype) -> ctypes.CDLL | None:
        """Return the library for a dtype, compiled if necessary; None if that fails."""
        if dtype not in self.libraries:
            self.libraries[dtype] = self._load(dtype)
        return self.libraries[dtype]

    def __getitem__(self, dtype: torch.dtype) -> ctypes.CDLL:
        library = self.library(dtype)
        assert library is not None
        return library

    def _load(self, dtype: torch.dtype) -> ctypes.CDLL | None:
        command = find_compiler()
        if command is None:
            log.warning(
                "no C++ compiler found: the %s kernels fall back to plain PyTorch, slowly; "
                "install g++",
                self.name,
            )
            return None
        element = CPP_TYPES[dtype].strip("_").lower()
        name = f"{self.source.stem}-{element}-{self._fingerprint(command)}.so"
        try:
            file = create_kernel_folder("cpp") / name
            if not file.exists():
                announce_compilation(file.parent)
                self.compile(command, CPP_TYPES[dtype], file)
            return ctypes.CDLL(str(file))
        except (OSError, subprocess.CalledProcessError) as error:  # OSError: no space, or noexec
            reason = getattr(error, "stderr", None) or str(error)
            log.warning(
                "the %s kernels cannot be compiled and loaded, using plain PyTorch: %.300s "
                "(XDG_CACHE_HOME names another folder for them)",
                *(self.name, reason),
            )
            return None

    def compile(self, compiler: str, element: str, file: Path) -> None:
        """Compile for this processor and with several threads where that works.

        The file gets its name when it is complete: other processes may compile the same one.
        """
        command = [compiler, "-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC"]
        command += [f"-DELEMENT={element}", f"-I{HEADERS}", "-w", str(self.source)]
        native, openmp = ["-march=native"], ["-fopenmp"]
        with atomic_write(file) as draft:
            for flags in (native + openmp, openmp, native, []):
                try:
                    words = [*command, "-o", str(draft), *flags]
                    subprocess.run(words, check=True, capture_output=True, text=True)
                    break
                except subprocess.CalledProcessError:
                    if not flags:
                        raise
        if "-fopenmp" not in flags:
            log.warning(
                "%s has no OpenMP: the %s kernels use one thread; install g++ and set CXX",
                *(compiler, self.name),
            )

    def _fingerprint(self, compiler: str) -> str:
        """Hash all that a library depends on: machines with other CPUs may share a home folder."""
        parts = [compiler.encode(), platform.machine().encode()]
        folders = (HEADERS, self.source.parent)
        parts += [file.read_bytes() for folder in folders for file in sorted(folder.iterdir())]
        flags = (line for line in read_lines(Path("/proc/cpuinfo")) if line.startswith("flags"))
        parts.append(next(flags, "").encode())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@cache
def announce_compilation(folder: Path) -> None:
    """Say once why the first step waits, at a level that is shown by default."""
    log.warning(
        "compiling C++ kernels for this machine, about 5 s for each kind and dtype: the next "
        "process finds them in %s",
        folder,
    )


def count_threads(x: Tensor) -> int:
    """Return how many threads a kernel takes for x; one if it is small."""
    return torch.get_num_threads() if x.numel() >= MIN_PARALLEL_ELEMENTS else 1


def get_data_ptr(x: Tensor | None) -> ctypes.c_void_p:
    """Return the address of a tensor's data, or a null pointer for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())
