"""Launch the Triton kernels on channels-last maps; Triton is imported on first use."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from unet3d.cpp_kernels import has_triton

TYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 2048  # elements that a program holds in registers
PROGRAMS = 1024  # approximate number of programs that sum up a map


def supports(x: Tensor) -> bool:
    """Return whether the kernels take x."""
    return x.dtype in TYPES and has_triton("fused-block")


def moments(y: Tensor, out: Tensor) -> None:
    """Run norm_ops.moments."""
    from unet3d.model.fused.kernels.triton import moments_kernel

    (grid, sizes), (b, c) = _sums(y), y.shape[:2]
    parts = out.new_empty(grid[0], 2, b, c)
    _launch(moments_kernel, grid, y, parts, *_space(y), *_strides(y), b, **sizes)
    voxels, per_program = prod(y.shape[2:]), sizes["TILES"] * sizes["BV"]
    first = torch.arange(grid[0], device=y.device, dtype=out.dtype) * per_program
    counts = (voxels - first).clamp(max=per_program)[:, None, None]
    means, squares = parts[:, 0], parts[:, 1]
    out[0] = (means * counts).sum(0) / voxels
    out[1] = (squares + (means - out[0]).square() * counts).sum(0)


def normalize(y: Tensor, scale: Tensor, shift: Tensor, slope: float, out: Tensor) -> None:
    """Run norm_ops.normalize."""
    from unet3d.model.fused.kernels.triton import normalize_kernel

    grid, sizes = _elements(y)
    arguments = (y, out, scale, shift, slope, *_space(y), *_strides(y), *_strides(out))
    _launch(normalize_kernel, grid, *arguments, **sizes)


def gradient_sums(g: Tensor, y: Tensor, *numbers: Tensor, slope: float, out: Tensor) -> None:
    """Run norm_ops.gradient_sums."""
    from unet3d.model.fused.kernels.triton import gradient_sums_kernel

    (grid, sizes), (b, c) = _sums(y), y.shape[:2]
    parts = out.new_empty(grid[0], 2, b, c)
    arguments = (g, y, *numbers, parts, slope, *_space(y), *_strides(g), *_strides(y), b)
    _launch(gradient_sums_kernel, grid, *arguments, **sizes)
    torch.sum(parts, 0, out=out)


def gradient(g: Tensor, y: Tensor, *numbers: Tensor, slope: float, out: Tensor) -> None:
    """Run norm_ops.gradient."""
    from unet3d.model.fused.kernels.triton import gradient_kernel

    grid, sizes = _elements(y)
    strides = (*_strides(g), *_strides(y), *_strides(out))
    _launch(gradient_kernel, grid, g, y, out, *numbers, slope, *_space(y), *strides, **sizes)


def interpolate(low: Tensor, axes: Sequence[int], linear: bool, out: Tensor) -> None:
    """Run upsample_ops.interpolate."""
    from unet3d.model.fused.kernels.triton import interpolate_kernel

    grid, sizes = _elements(out)
    arguments = (low, out, *_space(out), *_strides(low), *_strides(out), *axes)
    _launch(interpolate_kernel, grid, *arguments, LINEAR=linear, **sizes)


def interpolate_gradient(g: Tensor, axes: Sequence[int], linear: bool, low: Tensor) -> None:
    """Run upsample_ops.interpolate_gradient: W first, then H, then D, each on a smaller input."""
    from unet3d.model.fused.kernels.triton import downsample_kernel

    for axis in (2, 1, 0):
        shape = list(g.shape)
        shape[axis + 2] = low.shape[axis + 2]
        out = low
        if axis:
            format = torch.channels_last_3d
            out = torch.empty(shape, dtype=torch.float32, device=g.device, memory_format=format)
        first, size, low_first, low_size = axes[4 * axis : 4 * axis + 4]
        taps = size // low_size
        if linear:
            taps = size if low_size == 1 else -(-2 * (size - 1) // (low_size - 1)) + 3
        grid, sizes = _elements(out)
        positions = (first, g.shape[axis + 2], size, low_first, low_size, taps)
        arguments = (g, out, *_space(out), *_strides(g), *_strides(out), *positions)
        _launch(
            downsample_kernel, grid, *arguments, AXIS=axis, LINEAR=linear, ADD=axis == 0, **sizes
        )
        g = out


def _launch(kernel: Any, grid: tuple[int, int, int], *arguments: Any, **constants: Any) -> None:
    kernel[grid](*arguments, **constants)


def _space(x: Tensor) -> tuple[int, int, int, int]:
    """Return V = D * H * W, and C, H, W."""
    _, c, d, h, w = x.shape
    return d * h * w, c, h, w


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of B, D, H, W; the stride of C is 1."""
    b, _, d, h, w = x.stride()
    return b, d, h, w


def _tile(c: int) -> tuple[int, int]:
    """Return the voxels and channels of a tile."""
    channels = min(64, 1 << (c - 1).bit_length())
    return TILE // channels, channels


def _elements(x: Tensor) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid of a kernel that writes x, and its tile."""
    voxels, c, _, _ = _space(x)
    bv, bc = _tile(c)
    return (-(-voxels // bv), len(x), -(-c // bc)), {"BV": bv, "BC": bc}


def _sums(x: Tensor) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid of a kernel that sums x, its tile, and the tiles per program."""
    (tiles, b, c), sizes = _elements(x)
    per_program = max(1, tiles * b * c // PROGRAMS)
    return (-(-tiles // per_program), b, c), {"TILES": per_program, **sizes}
