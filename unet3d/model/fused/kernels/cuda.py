"""Launch the Triton kernels on channels-last maps; Triton is imported on first use."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from unet3d.triton_kernels import has_triton, launch

TYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 2048  # elements that a program holds in registers
PROGRAMS = 1024  # approximate number of programs that sum up a map
PART_BLOCK = {"BP": 256, "BN": 8}  # parts and columns that a program adds at a time


def supports(x: Tensor) -> bool:
    """Return whether the kernels take x."""
    return x.dtype in TYPES and has_triton("fused-block")


def _kernels() -> Any:
    from unet3d.model.fused.kernels import triton

    return triton


def add_moments(y: Tensor, count: int, total: Tensor) -> None:
    """Run norm_ops.add_moments."""
    (grid, sizes), (b, c) = _sums(y), y.shape[:2]
    parts = total.new_empty(grid[0], 2, b, c)
    launch(
        _kernels().moments_kernel, y.device, grid, y, parts, *_space(y), *_strides(y), b, **sizes
    )
    voxels, per_part = prod(y.shape[2:]), sizes["TILES"] * sizes["BV"]
    numbers = (grid[0], b * c, count, voxels, per_part)
    launch(_kernels().merge_moments_kernel, y.device, *_merge(parts, total), *numbers, **PART_BLOCK)


def normalize(
    y: Tensor, scale: Tensor, shift: Tensor, slope: float, add: bool, out: Tensor
) -> None:
    """Run norm_ops.normalize."""
    grid, sizes = _elements(y)
    arguments = (y, out, scale, shift, slope, *_space(y), *_strides(y), *_strides(out))
    launch(_kernels().normalize_kernel, y.device, grid, *arguments, ADD=add, **sizes)


def add_gradient_sums(
    g: Tensor, y: Tensor, *numbers: Tensor, slope: float, first: bool, sums: Tensor
) -> None:
    """Run norm_ops.add_gradient_sums."""
    (grid, sizes), (b, c) = _sums(y), y.shape[:2]
    parts = sums.new_empty(grid[0], 2, b, c)
    arguments = (g, y, *numbers, parts, slope, *_space(y), *_strides(g), *_strides(y), b)
    launch(_kernels().gradient_sums_kernel, y.device, grid, *arguments, **sizes)
    counts = (grid[0], 2 * b * c, int(first))
    launch(_kernels().add_parts_kernel, y.device, *_merge(parts, sums), *counts, **PART_BLOCK)


def gradient(g: Tensor, y: Tensor, *numbers: Tensor, slope: float, out: Tensor) -> None:
    """Run norm_ops.gradient."""
    grid, sizes = _elements(y)
    strides = (*_strides(g), *_strides(y), *_strides(out))
    arguments = (g, y, out, *numbers, slope, *_space(y), *strides)
    launch(_kernels().gradient_kernel, y.device, grid, *arguments, **sizes)


def activation_gradient(a: Tensor, slope: float, g: Tensor) -> None:
    """Run norm_ops.activation_gradient."""
    grid, sizes = _elements(a)
    arguments = (a, g, slope, *_space(a), *_strides(a), *_strides(g))
    launch(_kernels().activation_gradient_kernel, a.device, grid, *arguments, **sizes)


def fold_statistics(
    total: Tensor,
    count: int,
    groups: int,
    over_batch: bool,
    eps: float,
    *optional: Tensor | None,
    momentum: float,
    out: Tensor,
) -> None:
    """Run statistics_ops.fold; `optional` are weight, shift, bias and both running statistics."""
    grid, sizes = _groups(total, groups, over_batch)
    weight, _, bias, running_mean, _ = optional
    _, b, c = total.shape
    values = b * count if over_batch else count * (c // groups)
    numbers = (b, c, float(count), values / max(1, values - 1), eps, momentum)
    present = {
        "AFFINE": weight is not None,
        "BIAS": bias is not None,
        "RUNNING": running_mean is not None,
    }
    tensors = (total, *(total if t is None else t for t in optional), out)
    launch(
        _kernels().fold_statistics_kernel,
        total.device,
        grid,
        *tensors,
        *numbers,
        **present,
        **sizes,
    )


def fold_gradient(
    sums: Tensor,
    scale: Tensor,
    mean: Tensor,
    inverse: Tensor,
    count: int,
    groups: int,
    over_batch: bool,
    out: Tensor,
) -> None:
    """Run statistics_ops.fold_gradient."""
    grid, sizes = _groups(sums, groups, over_batch)
    _, b, c = sums.shape
    arguments = (sums, scale, mean, inverse, out, b, c, float(count))
    launch(_kernels().fold_gradient_kernel, sums.device, grid, *arguments, **sizes)


def interpolate(low: Tensor, axes: Sequence[int], linear: bool, out: Tensor) -> None:
    """Run upsample_ops.interpolate."""
    grid, sizes = _elements(out)
    arguments = (low, out, *_space(out), *_strides(low), *_strides(out), *axes)
    launch(_kernels().interpolate_kernel, out.device, grid, *arguments, LINEAR=linear, **sizes)


def interpolate_gradient(g: Tensor, axes: Sequence[int], linear: bool, low: Tensor) -> None:
    """Run upsample_ops.interpolate_gradient: W first, then H, then D, each on a smaller input."""
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
        constants = {"AXIS": axis, "LINEAR": linear, "ADD": axis == 0, **sizes}
        launch(_kernels().downsample_kernel, g.device, grid, *arguments, **constants)
        g = out


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


def _merge(parts: Tensor, result: Tensor) -> tuple[tuple[int], Tensor, Tensor]:
    """Return the grid of a kernel that merges parts, and its tensors."""
    return (-(-result.numel() // PART_BLOCK["BN"]),), parts, result


def _groups(sums: Tensor, groups: int, over_batch: bool) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid of a kernel with a program per group of statistics, and its sizes."""
    _, b, c = sums.shape
    size = c // groups
    programs, members = (groups, b * size) if over_batch else (b * groups, size)
    sizes = {"GROUP": size, "OVER_BATCH": over_batch}
    return (programs,), {**sizes, "MEMBERS": 1 << (members - 1).bit_length()}
