"""Operators that upsample some rows (trilinear, corners aligned, or nearest), and their transpose.

`axes` has four numbers for each of D, H and W: the first position in the upsampled map, the size of
that map, the first position in the coarser map, and the size of that map. The number of positions
is the size of the tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unet3d.custom_ops import custom_op
from unet3d.model.fused.kernels import dispatch
from unet3d.model.fused.tiling import iter_channels


@custom_op("unet3d::interpolate", mutates_args=("out",))
def interpolate(low: Tensor, axes: Sequence[int], linear: bool, out: Tensor) -> None:
    """Write the positions `axes` of the upsampled map to `out`."""
    if kernels := dispatch.select_kernels(low, out):
        return kernels.interpolate(low, axes, linear, out)
    matrices = _matrices(axes, linear, out, low)
    for c in iter_channels(out):
        x = low[:, c].to(matrices[0].dtype)
        for axis, matrix in enumerate(matrices, start=2):
            x = (x.movedim(axis, -1) @ matrix.t()).movedim(-1, axis)
        out[:, c] = x


@custom_op("unet3d::interpolate_gradient", mutates_args=("low",))
def interpolate_gradient(g: Tensor, axes: Sequence[int], linear: bool, low: Tensor) -> None:
    """Add the coarser map's gradient, given that of the positions `axes`, to `low`."""
    if kernels := dispatch.select_kernels(low, g):
        return kernels.interpolate_gradient(g, axes, linear, low)
    matrices = _matrices(axes, linear, g, low)
    for c in iter_channels(g):
        x = g[:, c].to(matrices[0].dtype)
        for axis, matrix in enumerate(matrices, start=2):
            x = (x.movedim(axis, -1) @ matrix).movedim(-1, axis)
        low[:, c] += x


@interpolate.register_fake
@interpolate_gradient.register_fake
def _(*arguments: object) -> None:
    return None


@interpolate_gradient.register_temporaries
def _(g: Tensor, axes: Sequence[int], linear: bool, low: Tensor) -> list[int]:
    """Return the bytes of the float32 sums along W, and of those along W and H."""
    b, c, d, h, _ = g.shape
    low_h, low_w = low.shape[3:]
    return [4 * b * c * d * h * low_w, 4 * b * c * d * low_h * low_w]


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
