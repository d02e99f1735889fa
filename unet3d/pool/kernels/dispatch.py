"""Which kernels take a tensor: Triton's on CUDA, compiled C++ on the CPU, or none: plain torch."""

from types import ModuleType

from torch import Tensor

from unet3d.pool.kernels import cpu


def select_kernels(x: Tensor) -> ModuleType | None:
    """A module with `forward` and `backward`, as in cpu.py, or None."""
    if x.device.type == "cuda":
        from unet3d.pool.kernels import cuda

        return cuda if cuda.supports(x) else None
    return cpu if cpu.supports(x) else None
