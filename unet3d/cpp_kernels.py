"""Kernels in C++, compiled for this machine when they are first needed, and kept.

They are C++ and not left to torch.compile: one compilation of seconds serves every size and layout
of a type of element, and odd sizes are as fast as the rest.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger(__name__)

ELEMENTS = {torch.float32: "float", torch.bfloat16: "Bf16", torch.float16: "_Float16"}
WORTH_COMPILING = 1 << 16  # elements: 2 ms in plain torch, against 3 s of compiling


def compiler() -> str | None:
    """The command that compiles kernels for CPUs."""
    return os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)


def cache_folder() -> Path:
    """Where they are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unet3d"


class CppKernels:
    """A C++ file and what it includes; one library for each type of element."""

    def __init__(self, source: Path, what: str):
        self.source, self.what = source, what
        self.libraries: dict[torch.dtype, ctypes.CDLL | None] = {}

    def supports(self, x: Tensor) -> bool:
        """Whether they take x: small tensors do not start a compiler."""
        if x.device.type != "cpu" or x.dtype not in ELEMENTS:
            return False
        if x.numel() < WORTH_COMPILING and x.dtype not in self.libraries:
            return False
        return self.library(x.dtype) is not None

    def library(self, dtype: torch.dtype) -> ctypes.CDLL | None:
        """The library for a type of element, compiled if it is not yet; None: it cannot be."""
        if dtype not in self.libraries:
            self.libraries[dtype] = self._load(dtype)
        return self.libraries[dtype]

    def __getitem__(self, dtype: torch.dtype) -> ctypes.CDLL:
        found = self.library(dtype)
        assert found is not None
        return found

    def _load(self, dtype: torch.dtype) -> ctypes.CDLL | None:
        command = compiler()
        if command is None:
            log.warning("no C++ compiler found: plain torch instead of the %s kernels", self.what)
            return None
        element = ELEMENTS[dtype].strip("_").lower()
        name = f"{self.source.stem}-{element}-{self._fingerprint(command)}.so"
        folder = cache_folder()
        if not (folder / name).exists():
            log.info(
                "compiling the %s kernels for %s: about 5 s, once, kept in %s",
                *(self.what, dtype, folder),
            )
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.compile(command, ELEMENTS[dtype], folder / name)
            except (OSError, subprocess.CalledProcessError) as error:
                reason = getattr(error, "stderr", None) or str(error)
                log.warning(
                    "the %s kernels do not compile, plain torch instead: %.300s", self.what, reason
                )
                return None
        try:
            return ctypes.CDLL(str(folder / name))
        except OSError as error:
            where = f"{folder} is mounted noexec, and XDG_CACHE_HOME= can name another folder"
            reason = str(error) if allows_exec(folder) else where
            log.warning(
                "the %s kernels cannot be loaded, plain torch instead: %s", self.what, reason
            )
            return None

    def compile(self, compiler: str, element: str, target: Path) -> None:
        """Compile beside the target and move it there: another process may be doing the same."""
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            command = [compiler, "-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC"]
            command += [f"-DELEMENT={element}", "-w", str(self.source), "-o", str(made)]
            for extra in (["-march=native", "-fopenmp"], ["-fopenmp"], []):
                try:
                    subprocess.run([*command, *extra], check=True, capture_output=True, text=True)
                    break
                except subprocess.CalledProcessError:
                    if not extra:
                        raise
            made.replace(target)

    def _fingerprint(self, compiler: str) -> str:
        """What a library depends on: a home folder is shared by machines with other processors."""
        parts = [compiler.encode(), platform.machine().encode()]
        parts += [file.read_bytes() for file in sorted(self.source.parent.iterdir())]
        processor = Path("/proc/cpuinfo")
        if processor.exists():
            lines = processor.read_text().splitlines()
            parts += [next((line for line in lines if line.startswith("flags")), "").encode()]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def allows_exec(folder: Path) -> bool:
    """Whether code may be loaded from there: Docker mounts a tmpfs noexec unless told otherwise."""
    return not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)


def get_data_ptr(x: Tensor | None) -> ctypes.c_void_p:
    """Where a tensor lies."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


@cache
def has_triton(what: str) -> bool:
    """Whether there are kernels for CUDA; if not, it is said once for each user."""
    if find_spec("triton") is None:
        log.warning("Triton is not installed: %s on CUDA run in plain torch, and slowly", what)
        return False
    return True
