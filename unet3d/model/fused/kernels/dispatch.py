"""Choose the kernels for feature maps: Triton on CUDA, compiled C++ on CPUs, else plain PyTorch."""

from types import ModuleType

from torch import Tensor

from unet3d.custom_ops import get_device_type
from unet3d.model.fused.kernels import cpu


def select_kernels(*maps: Tensor) -> ModuleType | None:
    """Return the module of kernels, cpu or cuda, or None; the maps share one dtype and device."""
    if any(x.stride(1) != 1 and x.shape[1] > 1 for x in maps):
        return None  # not channels-last
    if get_device_type(maps[0]) == "cuda":
        from unet3d.model.fused.kernels import cuda

        return cuda if cuda.supports(maps[0]) else None
    return cpu if cpu.kernels.supports(maps[0]) else None
