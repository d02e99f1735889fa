"""The smooth median, written to be read, and its gradient."""

from collections.abc import Iterator

import torch
from torch import Tensor

from unet3d.pool.reference.median import gather_at, has_nan, take_middle_values
from unet3d.pool.windows import Windows


def approx_median(x: Tensor, windows: Windows, tau: float) -> Tensor:
    """The mean of the soft means around both middle values of a window; autograd can follow."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    with torch.no_grad():
        places = take_middle_values(values, windows)
    y = torch.zeros((), dtype=values.dtype, device=x.device)
    for place in places:
        middle = gather_at(values, windows, place)
        total, offset = _sums(values, windows, middle, tau)
        y = y + (middle + offset / total) / 2
    return y.masked_fill(has_nan(values, windows), torch.nan).to(x.dtype)


def approx_median_gradient(grad: Tensor, x: Tensor, windows: Windows, tau: float) -> Tensor:
    """The gradient by x, from x alone.

    With d = x_i - s, w its share of the weights and o the soft mean's offset from s, that mean's
    derivative by x_i is w - p and by s is the sum of all p, where p = w (d - o) sign(d) / tau.
    """
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    half = grad.to(values.dtype) / 2
    parts = [torch.zeros_like(half) for _ in range(windows.elements)]
    for place in take_middle_values(values, windows):
        middle = gather_at(values, windows, place)
        total, offset = _sums(values, windows, middle, tau)
        through = torch.zeros_like(middle)
        for part, (weight, d) in zip(parts, _weights(values, windows, middle, tau), strict=True):
            w = weight / total
            pull = w * torch.where(w > 0, d - offset / total, 0) * d.sign() / tau
            part += half * (w - pull)
            through += pull
        for i, part in enumerate(parts):
            part += torch.where(place == i, half * through, 0)
    return windows.scatter_add(x.shape, parts).to(x.dtype)


def _sums(x: Tensor, windows: Windows, middle: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """The sum of the weights, and of the weighted distances from the middle."""
    total, offset = torch.zeros_like(middle), torch.zeros_like(middle)
    for weight, d in _weights(x, windows, middle, tau):
        total = total + weight
        offset = offset + weight * torch.where(weight > 0, d, 0)
    return total, offset


def _weights(
    x: Tensor, windows: Windows, middle: Tensor, tau: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each of the K elements its weight, not normalised, and its distance from the middle."""
    inside = windows.valid_masks(x)
    for i, view in enumerate(windows.views(x, fill=0)):
        # inf - inf and 0 * inf are NaN: the same inf is no distance, and a far one weighs 0.
        distance = torch.where(view.isinf() & (view == middle), 0, view - middle)
        weight = torch.exp(-distance.abs() / tau)
        yield weight if inside is None else weight * inside[i], distance
