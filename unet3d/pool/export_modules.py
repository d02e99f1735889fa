"""Pooling layers made of standard operators, for export; values are equal for finite input.

They use no kernels and no codes, so training with them would store much more.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn

from unet3d.pool.approx_median import ApproxMedianPool3d
from unet3d.pool.avg import AvgPool3d
from unet3d.pool.max import MaxPool3d
from unet3d.pool.median import MedianPool3d
from unet3d.pool.sorting_network import choose_median_network
from unet3d.pool.windows import PoolWindows

MAX_COMPARED = 32
"""Larger windows are sorted: a median network for 32 elements already has 284 operators."""


class Median(nn.Module):
    """MedianPool3d by minima and maxima of two values."""

    def __init__(self, windows: PoolWindows):
        super().__init__()
        self.windows = windows

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W')."""
        low, high = compute_middle_values(x, self.windows)
        return low / 2 + high / 2


class ApproxMedian(nn.Module):
    """ApproxMedianPool3d by minima and maxima, and soft means around both middle values."""

    def __init__(self, windows: PoolWindows, tau: float):
        super().__init__()
        self.windows, self.tau = windows, tau

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W')."""
        elements = torch.stack(list(self.windows.views(x, fill=torch.inf)))  # (K, B, C, D', H', W')
        means = []
        for middle in compute_middle_values(x, self.windows):
            distance = elements - middle
            weight = torch.exp(-distance.abs() / self.tau)
            distance = torch.where(weight > 0, distance, 0)  # padding: 0 * inf is NaN
            means.append(middle + (weight * distance).sum(0) / weight.sum(0))
        return means[0] / 2 + means[1] / 2


REPLACEMENTS: dict[type[nn.Module], Callable] = {
    MaxPool3d: lambda pool: nn.MaxPool3d(*pool.windows.axes),
    AvgPool3d: lambda pool: nn.AvgPool3d(*pool.windows.axes),
    MedianPool3d: lambda pool: Median(pool.windows),
    ApproxMedianPool3d: lambda pool: ApproxMedian(pool.windows, pool.tau),
}


def replace_with_plain(network: nn.Module) -> None:
    """Replace our pooling layers in a network, at any depth, by standard operators."""
    for module in list(network.modules()):
        for name, part in module.named_children():
            if type(part) in REPLACEMENTS:
                setattr(module, name, REPLACEMENTS[type(part)](part))


def compute_middle_values(x: Tensor, windows: PoolWindows) -> tuple[Tensor, Tensor]:
    """Return the lower and upper middle value of each window's elements inside the volume."""
    values = list(windows.views(x, fill=torch.inf))
    count = len(values)
    if any(windows.padding):
        return _middle_values_inside(torch.stack(values, -1).sort(-1).values, x, windows)
    low, high = (count - 1) // 2, count // 2
    if count > MAX_COMPARED:
        values = torch.stack(values, -1).sort(-1).values
        return values[..., low], values[..., high]
    for first, second, outputs in choose_median_network(count, padded=False):
        a, b = values[first], values[second]
        if outputs & 1:
            values[first] = torch.minimum(a, b)
        if outputs & 2:
            values[second] = torch.maximum(a, b)
    return values[low], values[high]


def _middle_values_inside(
    ordered: Tensor, x: Tensor, windows: PoolWindows
) -> tuple[Tensor, Tensor]:
    """Return the middle values of sorted windows (..., K) whose padding comes last."""
    d, h, w = (
        [min(start + k, n) - max(start, 0) for start in range(-p, n + p - k + 1, s)]
        for n, k, s, p in zip(x.shape[-3:], *windows.axes, strict=True)
    )
    a, b, c = map(torch.tensor, (d, h, w))
    inside = a[:, None, None] * b[:, None] * c  # elements per window
    low = high = ordered[..., 0]  # right where one element is inside
    for count in sorted({i * j * k for i, j, k in product(set(d), set(h), set(w))} - {1}):
        selected = inside == count
        low = torch.where(selected, ordered[..., (count - 1) // 2], low)
        high = torch.where(selected, ordered[..., count // 2], high)
    return low, high
