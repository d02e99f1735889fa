"""Which kernels take some maps: Triton's on CUDA, compiled C++ on the CPU, or none: plain torch."""

from types import ModuleType

from torch import Tensor

from unet3d.model.lean.kernels import cpu


def select_kernels(*maps: Tensor) -> ModuleType | None:
    """A module with the functions of cpu.py, or None; the maps are of one type and device."""
    if any(x.stride(1) != 1 and x.shape[1] > 1 for x in maps):
        return None  # not channels-last
    if maps[0].device.type == "cuda":
        from unet3d.model.lean.kernels import cuda

        return cuda if cuda.supports(maps[0]) else None
    return cpu if cpu.supports(maps[0]) else None
