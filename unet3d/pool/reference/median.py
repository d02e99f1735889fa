"""The exact median, written to be read: ranks by comparing every two elements of a window."""

import torch
from torch import Tensor

from unet3d.pool.argmax_codes import SelectedIndices
from unet3d.pool.windows import Windows


def median(x: Tensor, windows: Windows) -> tuple[Tensor, SelectedIndices]:
    """The median of each window, and the places of the elements that it is the mean of."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    places = take_middle_values(values, windows)
    y = gather_at(values, windows, places.low) / 2 + gather_at(values, windows, places.high) / 2
    return y.masked_fill(has_nan(values, windows), torch.nan).to(x.dtype), places


def take_middle_values(x: Tensor, windows: Windows) -> SelectedIndices:
    """The lower and the upper middle element of each window.

    An element's rank is the number of those before it in a stable sort; padding sorts last. In a
    window with NaN nothing has a rank: its first element stands for the lower middle, and its
    second, where two are to be taken, for the upper.
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
    nan, count, seen = has_nan(x, windows), sum(v.short() for v in inside), 0
    low, high = (torch.zeros(shape, dtype=torch.int16, device=x.device) for _ in range(2))
    for i, rank in enumerate(ranks):
        rank = torch.where(nan, (count - 1) // 2 + seen, rank)
        low.masked_fill_((rank == (count - 1) // 2) & inside[i], i)
        high.masked_fill_((rank == count // 2) & inside[i], i)
        seen = seen + inside[i].short()
    return SelectedIndices(low, high)


def gather_at(x: Tensor, windows: Windows, places: Tensor) -> Tensor:
    """The element at `places` of each window."""
    taken = x.new_zeros(places.shape)
    for i, view in enumerate(windows.views(x, fill=0)):
        taken = torch.where(places == i, view, taken)
    return taken


def has_nan(x: Tensor, windows: Windows) -> Tensor:
    """Which windows hold NaN."""
    found = torch.zeros((), dtype=torch.bool, device=x.device)
    for view in windows.views(x, fill=0):
        found = found | view.isnan()
    return found
