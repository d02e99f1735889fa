"""Reference median pooling: rank the elements of a window by comparing every pair."""

import torch
from torch import Tensor

from unet3d.pool.argmax_codes import SelectedIndices
from unet3d.pool.windows import PoolWindows


def median(x: Tensor, windows: PoolWindows) -> tuple[Tensor, SelectedIndices]:
    """Return the median of each window, and the indices of the middle elements."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    indices = select_middle(values, windows)
    y = gather_at(values, windows, indices.low) / 2 + gather_at(values, windows, indices.high) / 2
    return y.masked_fill(has_nan(values, windows), torch.nan).to(x.dtype), indices


def select_middle(x: Tensor, windows: PoolWindows) -> SelectedIndices:
    """Return the indices of the lower and upper middle element of each window.

    An element's rank is its position in a stable sort; padding sorts last. A window with NaN has no
    ranks: its first element inside the volume is selected, and its second where two are needed.
    """
    views = list(windows.views(x, fill=torch.inf))
    inside = windows.valid_masks(x)
    if inside is None:
        inside = [torch.ones((), dtype=torch.bool, device=x.device)] * len(views)
    shape = views[0].shape
    ranks = [torch.zeros(shape, dtype=torch.int16, device=x.device) for _ in views]
    for j, b in enumerate(views):
        for i, a in enumerate(views[:j]):
            first = (a <= b) & inside[i] | ~inside[j]
            ranks[j] += first
            ranks[i] += ~first
    nan, count, before = has_nan(x, windows), sum(v.short() for v in inside), 0
    low, high = (torch.zeros(shape, dtype=torch.int16, device=x.device) for _ in range(2))
    for i, rank in enumerate(ranks):
        rank = torch.where(nan, (count - 1) // 2 + before, rank)
        low.masked_fill_((rank == (count - 1) // 2) & inside[i], i)
        high.masked_fill_((rank == count // 2) & inside[i], i)
        before = before + inside[i].short()
    return SelectedIndices(low, high)


def gather_at(x: Tensor, windows: PoolWindows, indices: Tensor) -> Tensor:
    """Return the element at `indices` of each window."""
    values = x.new_zeros(indices.shape)
    for i, view in enumerate(windows.views(x, fill=0)):
        values = torch.where(indices == i, view, values)
    return values


def has_nan(x: Tensor, windows: PoolWindows) -> Tensor:
    """Return which windows hold NaN."""
    result = torch.zeros((), dtype=torch.bool, device=x.device)
    for view in windows.views(x, fill=0):
        result = result | view.isnan()
    return result
