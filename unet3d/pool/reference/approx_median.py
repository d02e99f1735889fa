"""Reference approximate median pooling and its gradient."""

from collections.abc import Iterator

import torch
from torch import Tensor

from unet3d.pool.reference.median import gather_at, has_nan, select_middle
from unet3d.pool.windows import PoolWindows


def approx_median(x: Tensor, windows: PoolWindows, tau: float) -> Tensor:
    """Return the mean of the soft means around both middle values; autograd differentiates it."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    with torch.no_grad():
        indices = select_middle(values, windows)
    y = torch.zeros((), dtype=values.dtype, device=x.device)
    for index in indices:
        middle = gather_at(values, windows, index)
        total, offset = _sums(values, windows, middle, tau)
        y = y + (middle + offset / total) / 2
    return y.masked_fill(has_nan(values, windows), torch.nan).to(x.dtype)


def approx_median_gradient(grad: Tensor, x: Tensor, windows: PoolWindows, tau: float) -> Tensor:
    """Return the gradient of x, recomputed from x.

    With d = x_i - s, w the normalized weight of x_i and o the soft mean's offset from s, the
    derivative of that mean by x_i is w - p, and by s the sum of p, for p = w (d - o) sign(d) / tau.
    """
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    half = grad.to(values.dtype) / 2
    parts = [torch.zeros_like(half) for _ in range(windows.elements)]
    for index in select_middle(values, windows):
        middle = gather_at(values, windows, index)
        total, offset = _sums(values, windows, middle, tau)
        through = torch.zeros_like(middle)
        for part, (weight, d) in zip(parts, _weights(values, windows, middle, tau), strict=True):
            w = weight / total
            pull = w * torch.where(w > 0, d - offset / total, 0) * d.sign() / tau
            part += half * (w - pull)
            through += pull
        for i, part in enumerate(parts):
            part += torch.where(index == i, half * through, 0)
    return windows.scatter_add(x.shape, parts).to(x.dtype)


def _sums(x: Tensor, windows: PoolWindows, middle: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return the sum of the weights, and that of the weighted distances from the middle."""
    total, offset = torch.zeros_like(middle), torch.zeros_like(middle)
    for weight, d in _weights(x, windows, middle, tau):
        total = total + weight
        offset = offset + weight * torch.where(weight > 0, d, 0)
    return total, offset


def _weights(
    x: Tensor, windows: PoolWindows, middle: Tensor, tau: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each of the K elements its unnormalized weight and its distance from the middle."""
    inside = windows.valid_masks(x)
    for i, view in enumerate(windows.views(x, fill=0)):
        # Avoid inf - inf: the distance of an infinity from itself is 0.
        distance = torch.where(view.isinf() & (view == middle), 0, view - middle)
        weight = torch.exp(-distance.abs() / tau)
        yield weight if inside is None else weight * inside[i], distance
