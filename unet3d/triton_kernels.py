"""Launch and compile Triton kernels; Triton itself is imported on first use."""

import logging
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from unet3d.custom_ops import get_device_type
from unet3d.files import set_compiler_caches

log = logging.getLogger(__name__)


OPTIONS = {"enable_fp_fusion": True}
"""Options of the compiler whose defaults differ between versions of Triton."""


@dataclass(frozen=True)
class Launch:
    """A kernel and what it is launched with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


_collected: list[Launch] | None = None


@cache
def has_triton(kernels: str) -> bool:
    """Return whether Triton is installed; otherwise warn once per kind of kernels.

    On ROCm the kernels have never run, and are not used.
    """
    if torch.version.hip is not None:
        log.warning("ROCm: the %s kernels fall back to plain PyTorch, which is slow", kernels)
        return False
    if find_spec("triton") is None:
        log.warning(
            "Triton is not installed: the CUDA %s kernels fall back to plain PyTorch, which is "
            "slow; install triton",
            kernels,
        )
        return False
    set_compiler_caches()
    return True


def runs_triton(x: torch.Tensor, kernels: str) -> bool:
    """Return whether Triton kernels take a tensor: on CUDA; a simulated GPU has Triton."""
    if x.device.type == "cuda":
        return has_triton(kernels)
    return get_device_type(x) == "cuda"


def launch(
    kernel: Any, device: torch.device, grid: tuple[int, ...], *arguments: Any, **constants: Any
) -> None:
    """Launch a kernel on the device of its tensors; Triton would take the current one."""
    if _collected is not None:
        _collected.append(Launch(kernel, grid, arguments, constants))
    elif device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*arguments, **constants, **OPTIONS)
    else:
        kernel[grid](*arguments, **constants, **OPTIONS)


def get_address(x: torch.Tensor) -> int:
    """Return where a tensor begins; without memory, where it would begin in its storage."""
    if isinstance(x, FakeTensor):
        return int(x.storage_offset()) * x.element_size()
    return x.data_ptr()


@contextmanager
def collect_launches() -> Generator[list[Launch]]:
    """List the launches of the body instead of running them."""
    global _collected
    previous, _collected = _collected, []
    try:
        yield _collected
    finally:
        _collected = previous


def compile_kernels(launches: Iterable[Launch], device: torch.device, threads: int) -> int:
    """Compile the kernels of these launches in parallel; return how many variants they have.

    A kernel that cannot be compiled fails when it is launched.
    """
    import triton

    with (
        torch.cuda.device(device),
        ThreadPoolExecutor(threads) as executor,
        triton.AsyncCompileMode(executor, ignore_errors=True),
    ):
        return len({id(compile_kernel(launch)) for launch in launches})


def compile_kernel(launch: Launch) -> Any:
    """Return the compiled kernel of a launch."""
    constants = {name: _describe(value) for name, value in launch.constants.items()}
    arguments = map(_describe, launch.arguments)
    return launch.kernel.warmup(*arguments, grid=launch.grid, **constants, **OPTIONS)


class _Pointer:
    """What Triton compiles a kernel for instead of a tensor: its type and its alignment."""

    def __init__(self, x: torch.Tensor):
        self.dtype = x.dtype
        self.offset = get_address(x) % 16

    def data_ptr(self) -> int:
        """Return an address with the tensor's alignment."""
        return self.offset


def _describe(value: Any) -> Any:
    """Return what stands for an argument that has no values yet."""
    return _Pointer(value) if isinstance(value, torch.Tensor) else value
