"""Choose the kernels for a tensor: Triton on CUDA, compiled C++ on CPUs, else plain PyTorch."""

from types import ModuleType

from torch import Tensor

from unet3d.custom_ops import get_device_type
from unet3d.pool.kernels import cpu


def select_kernels(x: Tensor) -> ModuleType | None:
    """Return the module of kernels, cpu or cuda, or None."""
    if get_device_type(x) == "cuda":
        from unet3d.pool.kernels import cuda

        return cuda if cuda.supports(x) else None
    return cpu if cpu.kernels.supports(x) else None
