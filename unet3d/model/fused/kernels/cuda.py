"""Launch the Triton kernels on channels-last maps; Triton is imported on first use."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from unet3d.custom_ops import custom_op
from unet3d.triton_kernels import launch

TILE = 2048  # elements that a program holds in registers
PROGRAMS = 1024  # approximate number of programs that sum up a map
MAX_TERMS = 6  # maps that the kernel of normalize takes
PART_BLOCK = {"BP": 256, "BN": 8}  # parts and columns that a program adds at a time


def _kernels() -> Any:
    from unet3d.model.fused.kernels import triton

    return triton


def add_moments(y: Tensor, count: int, total: Tensor) -> None:
    """Run operators.add_moments."""
    (grid, sizes), (b, c), kernels = _sums(*y.shape), y.shape[:2], _kernels()
    parts = total if len(total) > 1 else total.new_empty(grid[0], 2, b, c)
    launch(kernels.moments_kernel, y.device, grid, y, parts, *_layout(y, y), b, **sizes)
    if parts is not total:
        numbers = (grid[0], b * c, count, prod(y.shape[2:]), sizes["TILES"] * sizes["BV"])
        _merge(kernels.merge_moments_kernel, parts, total, *numbers)


def normalize(maps: Sequence[Tensor], *numbers: Sequence[Any], add: bool, out: Tensor) -> None:
    """Run operators.normalize; the last map stands for those that the kernel does not use."""
    (grid, sizes), unused = _elements(*out.shape), MAX_TERMS - len(maps)
    ys = [*maps, *[maps[-1]] * unused]
    padded = [n for own in numbers for n in (*own, *[own[-1]] * unused)]
    arguments = (*ys, *padded, out, *_layout(out, *ys, out))
    constants = {"COUNT": len(maps), "ADD": add, **sizes}
    launch(_kernels().normalize_kernel, out.device, grid, *arguments, **constants)


def add_norm_gradient_sums(
    g: Tensor, y: Tensor, *numbers: Tensor, slope: float, first: bool, sums: Tensor
) -> None:
    """Run operators.add_norm_gradient_sums."""
    (grid, sizes), (b, c), kernels = _sums(*y.shape), y.shape[:2], _kernels()
    parts = sums if len(sums) > 1 else sums.new_empty(grid[0], 2, b, c)
    arguments = (g, y, *numbers, parts, slope, *_layout(y, g, y), b)
    launch(kernels.gradient_sums_kernel, y.device, grid, *arguments, **sizes)
    if parts is not sums:
        _merge(kernels.add_parts_kernel, parts, sums, grid[0], 2 * b * c, int(first))


def norm_gradient(g: Tensor, y: Tensor, *numbers: Tensor, slope: float, out: Tensor) -> None:
    """Run operators.norm_gradient."""
    grid, sizes = _elements(*y.shape)
    arguments = (g, y, out, *numbers, slope, *_layout(y, g, y, out))
    launch(_kernels().gradient_kernel, y.device, grid, *arguments, **sizes)


# fold_statistics and fold_gradient each replace some twenty operations on (B, C) tensors, whose
# launches would take longer than their work. norms.py has the same in plain PyTorch, for CPUs and
# for statistics of several ranks.


@custom_op("unet3d::fold_statistics", mutates_args=("running_mean", "running_var", "batches"))
def fold_statistics(
    total: Tensor,
    count: int,
    groups: int,
    over_batch: bool,
    eps: float,
    weight: Tensor | None,
    shift: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    momentum: float,
) -> Tensor:
    """Return (4, B, C): scale, shift, mean and 1 / standard deviation; update running statistics.

    `total` are the moments (P, 2, B, C) of `count` values per volume and channel, without the
    convolution's `bias`; `weight` and `shift` are those of the norm, `batches` counts its updates.
    """
    (parts, _, b, c), (grid, sizes) = total.shape, _groups(total, groups, over_batch)
    out = total.new_empty(4, b, c)
    values = b * count if over_batch else count * (c // groups)
    _, split = _sums(b, c, count)
    numbers = (parts, b, c, count, split["TILES"] * split["BV"])
    numbers = (*numbers, values / max(1, values - 1), eps, momentum)
    sizes["AFFINE"], sizes["BIAS"] = weight is not None, bias is not None
    sizes["RUNNING"] = running_mean is not None
    optional = (weight, shift, bias, running_mean, running_var, batches)
    tensors = (total, *(total if t is None else t for t in optional), out)
    launch(_kernels().fold_statistics_kernel, total.device, grid, *tensors, *numbers, **sizes)
    return out


@custom_op("unet3d::fold_gradient")
def fold_gradient(
    sums: Tensor,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
    total: Tensor,
    count: int,
    groups: int,
    over_batch: bool,
) -> tuple[Tensor, Tensor]:
    """Return (2, B, C): `constant` and `linear` of NormGradient, from the sums of m and m * x.

    Also return (3, C): its `shift`, `weight` and `bias`. `sums`, and `total`, the moments of the
    map, are (P, 2, B, C).
    """
    (parts, _, b, c), (_, sizes) = sums.shape, _groups(sums, groups, over_batch)
    out, parameters = sums.new_empty(2, b, c), sums.new_empty(3, c)
    tensors = (sums, scale, mean, rstd, total, out, parameters)
    numbers = (parts, b, c, float(count), 1 if over_batch else b)
    launch(_kernels().fold_gradient_kernel, sums.device, (groups,), *tensors, *numbers, **sizes)
    return out, parameters


@fold_statistics.register_fake
def _(total: Tensor, *others: object) -> Tensor:
    return total.new_empty(4, *total.shape[2:])


@fold_gradient.register_fake
def _(sums: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    b, c = sums.shape[2:]
    return sums.new_empty(2, b, c), sums.new_empty(3, c)


def interpolate(low: Tensor, axes: Sequence[int], linear: bool, out: Tensor) -> None:
    """Run operators.interpolate."""
    grid, sizes = _elements(*out.shape)
    arguments = (low, out, *_layout(out, low, out), *axes)
    launch(_kernels().interpolate_kernel, out.device, grid, *arguments, LINEAR=linear, **sizes)


def interpolate_gradient(g: Tensor, axes: Sequence[int], linear: bool, low: Tensor) -> None:
    """Run operators.interpolate_gradient: W first, then H, then D, each on a smaller input."""
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
        grid, sizes = _elements(*out.shape)
        positions = (first, g.shape[axis + 2], size, low_first, low_size, taps)
        constants = {"AXIS": axis, "LINEAR": linear, "ADD": axis == 0, **sizes}
        arguments = (g, out, *_layout(out, g, out), *positions)
        launch(_kernels().downsample_kernel, g.device, grid, *arguments, **constants)
        g = out


def _layout(x: Tensor, *maps: Tensor) -> list[int]:
    """Return V = D * H * W, C, H and W of x, then the strides of B, D, H and W of each map."""
    _, c, d, h, w = x.shape
    numbers = [d * h * w, c, h, w]
    for y in maps:
        batch, _, *space = y.stride()  # the stride of C is 1
        numbers += [batch, *space]
    return numbers


def _elements(b: int, c: int, *size: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid of a kernel that writes a map, and the voxels and channels of its tile."""
    channels = min(64, 1 << (c - 1).bit_length())
    voxels = TILE // channels
    grid = (-(-prod(size) // voxels), b, -(-c // channels))
    return grid, {"BV": voxels, "BC": channels}


def _sums(*shape: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid of a kernel that sums a map, its tile, and the tiles per program."""
    (tiles, b, c), sizes = _elements(*shape)
    per_program = max(1, tiles * b * c // PROGRAMS)
    return (-(-tiles // per_program), b, c), {"TILES": per_program, **sizes}


def _merge(kernel: Any, parts: Tensor, result: Tensor, *numbers: int) -> None:
    """Launch a kernel that merges what the programs of another one have summed."""
    grid = (-(-result.numel() // PART_BLOCK["BN"]),)
    launch(kernel, result.device, grid, parts, result, *numbers, **PART_BLOCK)


def count_parts(y: Tensor) -> int:
    """Return the number of programs that each sum some voxels of y."""
    return _sums(*y.shape)[0][0]


def _groups(sums: Tensor, groups: int, over_batch: bool) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid of a kernel with a program per group of statistics, and its sizes."""
    parts, _, b, c = sums.shape
    size = c // groups
    programs, members = (groups, b * size) if over_batch else (b * groups, size)
    sizes = {"GROUP": size, "OVER_BATCH": over_batch, "BP": 1 if parts == 1 else PART_BLOCK["BP"]}
    return (programs,), {**sizes, "MEMBERS": 1 << (members - 1).bit_length()}
