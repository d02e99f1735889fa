"""Call the compiled kernels of cpp/ on channels-last maps."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unet3d.cpp_kernels import CppKernels, count_threads, get_data_ptr
from unet3d.model.fused.tiling import merge_moments

kernels = CppKernels(Path(__file__).parent / "cpp" / "fused.cpp", "fused-block")


class _Map(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 4),
    )


def add_moments(y: Tensor, count: int, total: Tensor) -> None:
    """Run operators.add_moments."""
    part = torch.empty_like(total) if count else total
    mean, squares = part[0]
    _run("moments", y, y, mean, squares)
    if count:
        merge_moments(total[0], count, part[0], y[0, 0].numel())


def normalize(maps: Sequence[Tensor], *numbers: Sequence[Any], add: bool, out: Tensor) -> None:
    """Run operators.normalize."""
    for y, *own in zip(maps, *numbers, strict=True):
        _run("add_normalized" if add else "normalize", y, y, out, *own)
        add = True


def add_norm_gradient_sums(
    g: Tensor, y: Tensor, *numbers: Tensor, slope: float, first: bool, sums: Tensor
) -> None:
    """Run operators.add_norm_gradient_sums."""
    part = sums if first else torch.empty_like(sums)
    _run("gradient_sums", y, g, y, *numbers, slope, part)
    if not first:
        sums += part


def norm_gradient(g: Tensor, y: Tensor, *numbers: Tensor, slope: float, out: Tensor) -> None:
    """Run operators.norm_gradient."""
    _run("gradient", y, g, y, out, *numbers, slope)


def interpolate(low: Tensor, axes: Sequence[int], linear: bool, out: Tensor) -> None:
    """Run operators.interpolate."""
    _run("interpolate", out, low, out, (ctypes.c_int64 * 12)(*axes), int(linear))


def interpolate_gradient(g: Tensor, axes: Sequence[int], linear: bool, low: Tensor) -> None:
    """Run operators.interpolate_gradient."""
    _run("interpolate_gradient", g, g, low, (ctypes.c_int64 * 12)(*axes), int(linear))


def _run(name: str, x: Tensor, *arguments: Any) -> None:
    """Run the kernel for the dtype of x, with as many threads as its size is worth."""
    getattr(kernels[x.dtype], name)(*map(_convert, arguments), count_threads(x))


def _convert(value: Any) -> Any:
    """Return a map, a contiguous tensor of sums or a number as C takes it."""
    if isinstance(value, float):
        return ctypes.c_float(value)
    if not isinstance(value, Tensor):
        return value
    if value.dim() != 5:
        assert value.is_contiguous()
        return get_data_ptr(value)
    b, _, d, h, w = value.stride()
    fields = (ctypes.c_int64 * 5)(*value.shape), (ctypes.c_int64 * 4)(b, d, h, w)
    return ctypes.byref(_Map(value.data_ptr(), *fields))
