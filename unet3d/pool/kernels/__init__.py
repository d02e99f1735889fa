"""Implementations of the poolings: Triton on CUDA, compiled C++ on CPUs, and plain PyTorch.

`forward` writes outputs and codes; `backward` writes the gradient of the input, and reads what was
saved: the codes, the input or nothing.
"""

from types import ModuleType

from torch import Tensor

from unet3d.custom_ops import get_device_type
from unet3d.pool.kernels import cpu, plain
from unet3d.triton_kernels import runs_triton


def select_kernels(x: Tensor) -> ModuleType:
    """Return the module for a tensor; Triton is imported on first use."""
    if get_device_type(x) == "cuda":
        from unet3d.pool.kernels import cuda

        return cuda if runs_triton(x, "pooling") else plain
    return cpu if cpu.kernels.supports(x) else plain
