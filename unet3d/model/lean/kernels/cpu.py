"""Calls the compiled kernels of cpp/ on channels-last maps."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from unet3d.cpp_kernels import CppKernels, get_data_ptr

WORTH_A_THREAD = 1 << 15  # elements

kernels = CppKernels(Path(__file__).parent / "cpp" / "lean.cpp", "norm")


class _Map(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 4),
    )


def supports(x: Tensor) -> bool:
    """Whether the kernels take maps of this type; small ones start no compiler."""
    return kernels.supports(x)


def moments(y: Tensor, out: Tensor) -> None:
    """See fused.py."""
    mean, squares = out
    kernels[y.dtype].moments(_map(y), get_data_ptr(mean), get_data_ptr(squares), _threads(y))


def normalize(y: Tensor, scale: Tensor, shift: Tensor, slope: float, out: Tensor) -> None:
    """See fused.py."""
    numbers = _numbers(scale, shift)
    kernels[y.dtype].normalize(_map(y), _map(out), *numbers, _float(slope), _threads(y))


def gradient_sums(g: Tensor, y: Tensor, *numbers: Tensor, slope: float, out: Tensor) -> None:
    """See fused.py."""
    door = kernels[y.dtype].gradient_sums
    door(_map(g), _map(y), *_numbers(*numbers), _float(slope), get_data_ptr(out), _threads(y))


def gradient(g: Tensor, y: Tensor, *numbers: Tensor, slope: float, out: Tensor) -> None:
    """See fused.py."""
    door = kernels[y.dtype].gradient
    door(_map(g), _map(y), _map(out), *_numbers(*numbers), _float(slope), _threads(y))


def interpolate(low: Tensor, axes: Sequence[int], linear: bool, out: Tensor) -> None:
    """See interpolation.py."""
    door = kernels[low.dtype].interpolate
    door(_map(low), _map(out), (ctypes.c_int64 * 12)(*axes), int(linear), _threads(out))


def interpolate_gradient(g: Tensor, axes: Sequence[int], linear: bool, low: Tensor) -> None:
    """Likewise."""
    door = kernels[low.dtype].interpolate_gradient
    door(_map(g), _map(low), (ctypes.c_int64 * 12)(*axes), int(linear), _threads(g))


def _map(x: Tensor):
    b, _, d, h, w = x.stride()
    made = _Map(x.data_ptr(), (ctypes.c_int64 * 5)(*x.shape), (ctypes.c_int64 * 4)(b, d, h, w))
    return ctypes.byref(made)


def _numbers(*found: Tensor) -> list[ctypes.c_void_p]:
    """Those per volume and channel, (B, C)."""
    assert all(t.is_contiguous() for t in found)
    return [get_data_ptr(t) for t in found]


def _float(value: float) -> ctypes.c_float:
    return ctypes.c_float(value)


def _threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() >= WORTH_A_THREAD else 1
