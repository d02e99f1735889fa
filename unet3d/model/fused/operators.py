"""Operators of fused blocks, by a kernel (Triton on CUDA, C++ on a CPU) or in plain PyTorch.

y is a raw convolution output (B, C, D, H, W) or some rows of one, g the gradient of its activation;
scale, shift and the like are (B, C), in the dtype of sums. n = scale * y + shift is the normalized
value, and m = g * act'(n) its gradient.

`axes` of an upsampling (trilinear with aligned corners, or nearest) has four numbers for each of D,
H and W: the first position in the upsampled map, the size of that map, the first position in the
coarser map, and the size of that map. The number of positions is the size of the tensor.
"""

from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from unet3d.custom_ops import custom_op, get_device_type, upcast
from unet3d.model.fused.kernels import cpu, cuda
from unet3d.model.fused.tiling import merge_moments
from unet3d.triton_kernels import runs_triton

MAX_TERMS = cuda.MAX_TERMS
"""Maps that are added up at once, if all of them are stored."""

CHUNK = 2**21
"""Elements of a map that plain PyTorch holds in float32 at once."""


def select_kernels(*maps: Tensor) -> ModuleType | None:
    """Return the module of kernels, cpu or cuda, or None; the maps share one dtype and device."""
    if any(x.stride(1) != 1 and x.shape[1] > 1 for x in maps):
        return None  # not channels-last
    if get_device_type(maps[0]) == "cuda":
        return cuda if runs_triton(maps[0], "fused-block") else None
    return cpu if cpu.kernels.supports(maps[0]) else None


@custom_op("unet3d::add_moments", mutates_args=("total",))
def add_moments(y: Tensor, count: int, total: Tensor) -> None:
    """Add y to `total` (P, 2, B, C): the mean, and the sum of squared deviations from it.

    `count` is the number of values per volume and channel in `total`; for 0 it is overwritten.
    """
    if kernels := select_kernels(y):
        return kernels.add_moments(y, count, total)
    (total,), n = total, y[0, 0].numel()
    result = torch.empty_like(total)
    for c in _iter_channels(y):
        variance, mean = torch.var_mean(upcast(y[:, c]), dim=(2, 3, 4), correction=0)
        result[0, :, c], result[1, :, c] = mean, variance * n
    merge_moments(total, count, result, n)


@custom_op("unet3d::normalize", mutates_args=("out",))
def normalize(
    maps: Sequence[Tensor],
    scales: Sequence[Tensor],
    shifts: Sequence[Tensor],
    slopes: Sequence[float],
    add: bool,
    out: Tensor,
) -> None:
    """Write act(n + the same of the map before) to out, for one map or several.

    With `add`, what is in `out` is added to the first one.
    """
    if kernels := select_kernels(*maps, out):
        return kernels.normalize(maps, scales, shifts, slopes, add=add, out=out)
    for y, scale, shift, slope in zip(maps, scales, shifts, slopes, strict=True):
        for c in _iter_channels(out):
            n = _normalized(y, scale, shift, c)
            if add:
                n += out[:, c]
            out[:, c] = n.clamp_min_(0) if slope == 0 else torch.where(n > 0, n, n * slope)
        add = True


@custom_op("unet3d::add_norm_gradient_sums", mutates_args=("sums",))
def add_norm_gradient_sums(
    g: Tensor,
    y: Tensor,
    scale: Tensor,
    shift: Tensor,
    mean: Tensor,
    rstd: Tensor,
    slope: float,
    first: bool,
    sums: Tensor,
) -> None:
    """Add the sums of m and of m * (y - mean) * rstd to (P, 2, B, C); if `first`, overwrite it."""
    if kernels := select_kernels(y, g):
        numbers = (scale, shift, mean, rstd)
        return kernels.add_norm_gradient_sums(g, y, *numbers, slope=slope, first=first, sums=sums)
    if first:
        sums.zero_()
    for c in _iter_channels(y):
        m = _activation_backward(g, y, scale, shift, slope, c)
        x = (upcast(y[:, c]) - _per_channel(mean[:, c])) * _per_channel(rstd[:, c])
        sums[0, 0, :, c] += m.sum((2, 3, 4))
        sums[0, 1, :, c] += (m * x).sum((2, 3, 4))


@custom_op("unet3d::norm_gradient", mutates_args=("out",))
def norm_gradient(
    g: Tensor,
    y: Tensor,
    scale: Tensor,
    shift: Tensor,
    constant: Tensor,
    linear: Tensor,
    slope: float,
    out: Tensor,
) -> None:
    """Write scale * m + constant + linear * y to out, which may be g or y."""
    if kernels := select_kernels(y, g, out):
        return kernels.norm_gradient(g, y, scale, shift, constant, linear, slope=slope, out=out)
    for c in _iter_channels(y):
        m = _activation_backward(g, y, scale, shift, slope, c)
        rest = _normalized(y, linear, constant, c)
        out[:, c] = rest.addcmul_(m, _per_channel(scale[:, c]))


@custom_op("unet3d::interpolate", mutates_args=("out",))
def interpolate(low: Tensor, axes: Sequence[int], linear: bool, out: Tensor) -> None:
    """Write the positions `axes` of the upsampled map to `out`."""
    if kernels := select_kernels(low, out):
        return kernels.interpolate(low, axes, linear, out)
    matrices = _matrices(axes, linear, out, low)
    for c in _iter_channels(out):
        x = low[:, c].to(matrices[0].dtype)
        for axis, matrix in enumerate(matrices, start=2):
            x = (x.movedim(axis, -1) @ matrix.t()).movedim(-1, axis)
        out[:, c] = x


@custom_op("unet3d::interpolate_gradient", mutates_args=("low",))
def interpolate_gradient(g: Tensor, axes: Sequence[int], linear: bool, low: Tensor) -> None:
    """Add the coarser map's gradient, given that of the positions `axes`, to `low`."""
    if kernels := select_kernels(low, g):
        return kernels.interpolate_gradient(g, axes, linear, low)
    matrices = _matrices(axes, linear, g, low)
    for c in _iter_channels(g):
        x = g[:, c].to(matrices[0].dtype)
        for axis, matrix in enumerate(matrices, start=2):
            x = (x.movedim(axis, -1) @ matrix).movedim(-1, axis)
        low[:, c] += x


@interpolate_gradient.register_temporaries
def _(g: Tensor, axes: Sequence[int], linear: bool, low: Tensor) -> list[int]:
    """Return the bytes of the float32 sums along W, and of those along W and H."""
    b, c, d, h, _ = g.shape
    low_h, low_w = low.shape[3:]
    return [4 * b * c * d * h * low_w, 4 * b * c * d * low_h * low_w]


def make_sums(y: Tensor, *, merged: bool = True) -> Tensor:
    """Allocate (P, 2, B, C) in the dtype of sums: those of P programs, or merged ones."""
    parts = 1 if merged or select_kernels(y) is not cuda else cuda.count_parts(y)
    dtype = torch.promote_types(y.dtype, torch.float32)
    return torch.empty(parts, 2, *y.shape[:2], dtype=dtype, device=y.device)


def _iter_channels(x: Tensor) -> Iterator[slice]:
    """Yield slices of the channels of (B, C, D, H, W), each of about CHUNK elements."""
    step = max(1, CHUNK * x.shape[1] // max(1, x.numel()))
    for start in range(0, x.shape[1], step):
        yield slice(start, start + step)


def _normalized(y: Tensor, scale: Tensor, shift: Tensor, c: slice) -> Tensor:
    return torch.addcmul(_per_channel(shift[:, c]), upcast(y[:, c]), _per_channel(scale[:, c]))


def _activation_backward(
    g: Tensor, y: Tensor, scale: Tensor, shift: Tensor, slope: float, c: slice
) -> Tensor:
    wide = upcast(g[:, c])
    return torch.where(_normalized(y, scale, shift, c) > 0, wide, wide * slope)


def _per_channel(t: Tensor) -> Tensor:
    return t[:, :, None, None, None]


def _matrices(axes: Sequence[int], linear: bool, up: Tensor, low: Tensor) -> list[Tensor]:
    """Return per axis a matrix (positions, coarser positions) of interpolation weights."""
    dtype, matrices = torch.promote_types(low.dtype, torch.float32), []
    for axis in range(3):
        first, size, low_first, low_size = axes[4 * axis : 4 * axis + 4]
        position = torch.arange(first, first + up.shape[axis + 2], device=low.device, dtype=dtype)
        coarse = torch.arange(low_first, low_first + low.shape[axis + 2], device=low.device)
        if linear:
            at = position * ((low_size - 1) / max(1, size - 1))
            matrices.append((1 - (at[:, None] - coarse).abs()).clamp_min_(0))
        else:
            matrices.append((torch.floor(position * low_size / size)[:, None] == coarse).to(dtype))
    return matrices
