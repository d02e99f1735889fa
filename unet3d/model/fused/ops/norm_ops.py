"""Operators that normalize and activate feature maps, and their backward.

y is a raw convolution output (B, C, D, H, W) or some rows of one, g the gradient of its activation;
scale, shift and the like are (B, C), in the dtype of sums. n = scale * y + shift is the normalized
value, and m = g * act'(n) its gradient.
"""

import torch
from torch import Tensor

from unet3d.custom_ops import custom_op
from unet3d.model.fused.kernels import dispatch
from unet3d.model.fused.tiling import iter_channels, merge_moments


@custom_op("unet3d::add_moments", mutates_args=("total",))
def add_moments(y: Tensor, count: int, total: Tensor) -> None:
    """Add y to `total` (2, B, C): the mean, and the sum of squared deviations from it.

    `count` is the number of values per volume and channel in `total`; for 0 it is overwritten.
    """
    if kernels := dispatch.select_kernels(y):
        return kernels.add_moments(y, count, total)
    result, n = torch.empty_like(total), y[0, 0].numel()
    for c in iter_channels(y):
        variance, mean = torch.var_mean(_upcast(y[:, c]), dim=(2, 3, 4), correction=0)
        result[0, :, c], result[1, :, c] = mean, variance * n
    merge_moments(total, count, result, n)


@custom_op("unet3d::normalize", mutates_args=("out",))
def normalize(
    y: Tensor, scale: Tensor, shift: Tensor, slope: float, add: bool, out: Tensor
) -> None:
    """Write act(n) to out; with `add`, write act(n + out)."""
    if kernels := dispatch.select_kernels(y, out):
        return kernels.normalize(y, scale, shift, slope, add, out)
    for c in iter_channels(y):
        n = _normalized(y, scale, shift, c)
        if add:
            n += out[:, c]
        out[:, c] = n.clamp_min_(0) if slope == 0 else torch.where(n > 0, n, n * slope)


@custom_op("unet3d::add_norm_gradient_sums", mutates_args=("sums",))
def add_gradient_sums(
    g: Tensor,
    y: Tensor,
    scale: Tensor,
    shift: Tensor,
    mean: Tensor,
    inverse: Tensor,
    slope: float,
    first: bool,
    sums: Tensor,
) -> None:
    """Add the sums of m and of m * (y - mean) * inverse to (2, B, C); if `first`, overwrite it."""
    if kernels := dispatch.select_kernels(y, g):
        numbers = (scale, shift, mean, inverse)
        return kernels.add_gradient_sums(g, y, *numbers, slope=slope, first=first, sums=sums)
    if first:
        sums.zero_()
    for c in iter_channels(y):
        m = _activation_backward(g, y, scale, shift, slope, c)
        x = (_upcast(y[:, c]) - _per_channel(mean[:, c])) * _per_channel(inverse[:, c])
        sums[0, :, c] += m.sum((2, 3, 4))
        sums[1, :, c] += (m * x).sum((2, 3, 4))


@custom_op("unet3d::norm_gradient", mutates_args=("out",))
def gradient(
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
    if kernels := dispatch.select_kernels(y, g, out):
        return kernels.gradient(g, y, scale, shift, constant, linear, slope=slope, out=out)
    for c in iter_channels(y):
        m = _activation_backward(g, y, scale, shift, slope, c)
        rest = _normalized(y, linear, constant, c)
        out[:, c] = rest.addcmul_(m, _per_channel(scale[:, c]))


@custom_op("unet3d::activation_gradient", mutates_args=("g",))
def activation_gradient(a: Tensor, slope: float, g: Tensor) -> None:
    """Multiply g by the derivative of the activation whose output is a."""
    if kernels := dispatch.select_kernels(a, g):
        return kernels.activation_gradient(a, slope, g)
    for c in iter_channels(a):
        g[:, c] = _scale_negative(g[:, c], a[:, c] > 0, slope)


@add_moments.register_fake
@add_gradient_sums.register_fake
@normalize.register_fake
@gradient.register_fake
@activation_gradient.register_fake
def _(*arguments: object) -> None:
    return None


def make_sums(y: Tensor) -> Tensor:
    """Allocate (2, B, C) in the dtype of sums."""
    dtype = torch.promote_types(y.dtype, torch.float32)
    return torch.empty(2, *y.shape[:2], dtype=dtype, device=y.device)


def _normalized(y: Tensor, scale: Tensor, shift: Tensor, c: slice) -> Tensor:
    return torch.addcmul(_per_channel(shift[:, c]), _upcast(y[:, c]), _per_channel(scale[:, c]))


def _activation_backward(
    g: Tensor, y: Tensor, scale: Tensor, shift: Tensor, slope: float, c: slice
) -> Tensor:
    return _scale_negative(g[:, c], _normalized(y, scale, shift, c) > 0, slope)


def _scale_negative(g: Tensor, is_positive: Tensor, slope: float) -> Tensor:
    """Return the gradient of an activation's input, given that of its output."""
    wide = _upcast(g)
    return torch.where(is_positive, wide, wide * slope)


def _per_channel(t: Tensor) -> Tensor:
    return t[:, :, None, None, None]


def _upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
