"""Launch and compile Triton kernels; Triton itself is imported on first use."""

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from unet3d.custom_ops import get_device_type

log = logging.getLogger(__name__)

KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)

OPTIONS = {"enable_fp_fusion": True}
"""Options of the compiler whose defaults differ between versions of Triton."""


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
    return True


def runs_triton(x: torch.Tensor, kernels: str) -> bool:
    """Return whether Triton kernels take a tensor: on CUDA; a simulated GPU has Triton."""
    if x.dtype not in KERNEL_TYPES or get_device_type(x) != "cuda":
        return False
    return x.device.type != "cuda" or has_triton(kernels)


def launch(
    kernel: Any, device: torch.device, grid: tuple[int, ...], *arguments: Any, **constants: Any
) -> None:
    """Launch a kernel on the device of its tensors; Triton would take the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*arguments, **constants, **OPTIONS)
    else:
        kernel[grid](*arguments, **constants, **OPTIONS)
