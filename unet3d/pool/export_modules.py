"""The poolings in operators that every runtime has, for export: equal values for finite input.

They know nothing of kernels and bytes for backward; trained with, they would keep a lot.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn

from unet3d.pool.approx_median import ApproxMedianPool3d
from unet3d.pool.avg import AvgPool3d
from unet3d.pool.max import MaxPool3d
from unet3d.pool.median import MedianPool3d
from unet3d.pool.sorting_network import EIGHT, build_median_network
from unet3d.pool.windows import Windows

MOST_COMPARED = 32
"""Elements of a window that are compared, 32 in 284 operators; of more the graph would be long."""


class Median(nn.Module):
    """MedianPool3d by the lesser and the greater of two."""

    def __init__(self, windows: Windows):
        super().__init__()
        self.windows = windows

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W')."""
        low, high = compute_middle_values(x, self.windows)
        return low / 2 + high / 2


class ApproxMedian(nn.Module):
    """ApproxMedianPool3d: the same, and soft means around both middle values."""

    def __init__(self, windows: Windows, tau: float):
        super().__init__()
        self.windows, self.tau = windows, tau

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W')."""
        elements = torch.stack(list(self.windows.views(x, fill=torch.inf)))  # (K, B, C, D', H', W')
        means = []
        for middle in compute_middle_values(x, self.windows):
            distance = elements - middle
            weight = torch.exp(-distance.abs() / self.tau)
            distance = torch.where(weight > 0, distance, 0)  # 0 times inf, of padding, is NaN
            means.append(middle + (weight * distance).sum(0) / weight.sum(0))
        return means[0] / 2 + means[1] / 2


TWINS: dict[type[nn.Module], Callable] = {
    MaxPool3d: lambda pool: nn.MaxPool3d(*pool.windows.axes),
    AvgPool3d: lambda pool: nn.AvgPool3d(*pool.windows.axes),
    MedianPool3d: lambda pool: Median(pool.windows),
    ApproxMedianPool3d: lambda pool: ApproxMedian(pool.windows, pool.tau),
}


def replace_with_plain(network: nn.Module) -> None:
    """Put the twins of our poolings into a network, at any depth."""
    for module in list(network.modules()):
        for name, part in module.named_children():
            if type(part) in TWINS:
                setattr(module, name, TWINS[type(part)](part))


def compute_middle_values(x: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """The lower and the upper middle value of each window, of its elements inside the volume."""
    values = list(windows.views(x, fill=torch.inf))
    count = len(values)
    if any(windows.padding):
        return _middles_inside(torch.stack(values, -1).sort(-1).values, x, windows)
    low, high = (count - 1) // 2, count // 2
    if count > MOST_COMPARED:
        values = torch.stack(values, -1).sort(-1).values
        return values[..., low], values[..., high]
    comparators = EIGHT if count == 8 else build_median_network(count, count % 2 == 0)
    for one, other, kept in comparators:
        a, b = values[one], values[other]
        if kept & 1:
            values[one] = torch.minimum(a, b)
        if kept & 2:
            values[other] = torch.maximum(a, b)
    return values[low], values[high]


def _middles_inside(ordered: Tensor, x: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """The middles of sorted windows (..., K) that padding, which comes last, has a part in."""
    d, h, w = (
        [min(at + k, n) - max(at, 0) for at in range(-p, n + p - k + 1, s)]
        for n, k, s, p in zip(x.shape[-3:], *windows.axes, strict=True)
    )
    a, b, c = map(torch.tensor, (d, h, w))
    inside = a[:, None, None] * b[:, None] * c
    low = high = ordered[..., 0]  # of windows with one element inside
    for count in sorted({i * j * k for i, j, k in product(set(d), set(h), set(w))} - {1}):
        here = inside == count
        low = torch.where(here, ordered[..., (count - 1) // 2], low)
        high = torch.where(here, ordered[..., count // 2], high)
    return low, high
