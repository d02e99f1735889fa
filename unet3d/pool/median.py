"""Exact median pooling; the median of an even number of elements is the mean of the middle two.

Padding is not counted: a window at the border has the median of its elements inside the volume. A
window with NaN gives NaN. Each of the two middle elements receives half of the gradient; of equal
elements the one with the lower index comes first, as in a stable sort. Backward stores one byte per
output (two for large windows, see argmax_codes.py), not the input.
"""

import torch
from torch import Tensor

from unet3d.pool.operators import Pool3d
from unet3d.pool.sorting_network import build_median_network
from unet3d.pool.windows import PoolWindows

MAX_COMPARED = 32
"""Exports sort larger windows: a median network for 32 elements already has 284 operators."""


class MedianPool3d(Pool3d):
    """Median pooling with the arguments of nn.MaxPool3d."""

    pool = "median"

    def pool_by_standard_operators(self, x: Tensor) -> Tensor:
        low, high = compute_middle_values(x, self.windows)
        return low / 2 + high / 2


def compute_middle_values(x: Tensor, windows: PoolWindows) -> tuple[Tensor, Tensor]:
    """Return the two middle values of each window, in either order, by minima and maxima."""
    values = list(windows.views(x, fill=torch.inf))
    if any(windows.padding) or len(values) > MAX_COMPARED:
        whole = torch.stack(values, -1)
        ordered = whole.sort(-1).values  # padding comes last, but for NaN
        ordered = ordered.masked_fill(whole.isnan().any(-1, keepdim=True), torch.nan)
        count = torch.stack(windows.valid_masks(x)).sum(0)[..., None]
        low, high = (
            ordered.gather(-1, middle.expand(*ordered.shape[:-1], 1))[..., 0]
            for middle in ((count - 1) // 2, count // 2)
        )
        return low, high
    for first, second, outputs in build_median_network(len(values), padded=False):
        a, b = values[first], values[second]
        if outputs & 1:
            values[first] = torch.minimum(a, b)
        if outputs & 2:
            values[second] = torch.maximum(a, b)
    return values[(len(values) - 1) // 2], values[len(values) // 2]
