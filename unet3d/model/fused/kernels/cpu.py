"""Call the compiled kernels of cpp/ on channels-last maps."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from unet3d.cpp_kernels import CppKernels, get_data_ptr
from unet3d.model.fused.tiling import merge_moments

MIN_PARALLEL_ELEMENTS = 1 << 15  # a smaller map runs on one thread

kernels = CppKernels(Path(__file__).parent / "cpp" / "fused.cpp", "fused-block")


class _Map(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 4),
    )


def add_moments(y: Tensor, count: int, total: Tensor) -> None:
    """Run norm_ops.add_moments."""
    part = torch.empty_like(total) if count else total
    mean, squares = part
    kernels[y.dtype].moments(_map(y), get_data_ptr(mean), get_data_ptr(squares), _threads(y))
    if count:
        merge_moments(total, count, part, y[0, 0].numel())


def normalize(
    y: Tensor, scale: Tensor, shift: Tensor, slope: float, add: bool, out: Tensor
) -> None:
    """Run norm_ops.normalize."""
    function = kernels[y.dtype].add_normalized if add else kernels[y.dtype].normalize
    function(_map(y), _map(out), *_pointers(scale, shift), _float(slope), _threads(y))


def add_gradient_sums(
    g: Tensor, y: Tensor, *numbers: Tensor, slope: float, first: bool, sums: Tensor
) -> None:
    """Run norm_ops.add_gradient_sums."""
    part = sums if first else torch.empty_like(sums)
    function = kernels[y.dtype].gradient_sums
    arguments = (*_pointers(*numbers), _float(slope), get_data_ptr(part), _threads(y))
    function(_map(g), _map(y), *arguments)
    if not first:
        sums += part


def gradient(g: Tensor, y: Tensor, *numbers: Tensor, slope: float, out: Tensor) -> None:
    """Run norm_ops.gradient."""
    function = kernels[y.dtype].gradient
    function(_map(g), _map(y), _map(out), *_pointers(*numbers), _float(slope), _threads(y))


def activation_gradient(a: Tensor, slope: float, g: Tensor) -> None:
    """Run norm_ops.activation_gradient."""
    kernels[a.dtype].activation_gradient(_map(a), _map(g), _float(slope), _threads(a))


def interpolate(low: Tensor, axes: Sequence[int], linear: bool, out: Tensor) -> None:
    """Run upsample_ops.interpolate."""
    function = kernels[low.dtype].interpolate
    function(_map(low), _map(out), (ctypes.c_int64 * 12)(*axes), int(linear), _threads(out))


def interpolate_gradient(g: Tensor, axes: Sequence[int], linear: bool, low: Tensor) -> None:
    """Run upsample_ops.interpolate_gradient."""
    function = kernels[low.dtype].interpolate_gradient
    function(_map(g), _map(low), (ctypes.c_int64 * 12)(*axes), int(linear), _threads(g))


def _map(x: Tensor):
    b, _, d, h, w = x.stride()
    fields = (ctypes.c_int64 * 5)(*x.shape), (ctypes.c_int64 * 4)(b, d, h, w)
    return ctypes.byref(_Map(x.data_ptr(), *fields))


def _pointers(*numbers: Tensor) -> list[ctypes.c_void_p]:
    """Return pointers to contiguous (B, C) tensors."""
    assert all(t.is_contiguous() for t in numbers)
    return [get_data_ptr(t) for t in numbers]


def _float(value: float) -> ctypes.c_float:
    return ctypes.c_float(value)


def _threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() >= MIN_PARALLEL_ELEMENTS else 1
