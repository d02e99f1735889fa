"""Reference poolings in plain PyTorch, also the fallback; the kernels are tested against them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unet3d.pool.argmax_codes import SelectedIndices
from unet3d.pool.windows import PoolWindows


def average(x: Tensor, windows: PoolWindows) -> Tensor:
    """Return the mean of each window; padding counts as zeros, as in nn.AvgPool3d."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    total = torch.zeros((), dtype=values.dtype, device=x.device)
    for view in windows.views(values, fill=0):
        total = total + view
    return (total / windows.elements).to(x.dtype)


def average_gradient(grad: Tensor, shape: Sequence[int], windows: PoolWindows) -> Tensor:
    """Return the gradient of the input."""
    share = grad.to(torch.promote_types(grad.dtype, torch.float32)) / windows.elements
    return windows.scatter_add(shape, (share for _ in range(windows.elements))).to(grad.dtype)


def maximum(x: Tensor, windows: PoolWindows) -> tuple[Tensor, SelectedIndices]:
    """Return the maximum of each window and the index that nn.MaxPool3d selects.

    It is the first of equal elements; NaN wins, and the last NaN over others.
    """
    inside = windows.valid_masks(x)
    best, index = None, None
    for i, view in enumerate(windows.views(x, fill=0)):
        if best is None or index is None:
            best, index = view, torch.full(view.shape, -1, dtype=torch.int16, device=x.device)
        wins = (view > best) | view.isnan() | (index < 0)
        if inside is not None:
            wins = wins & inside[i]
        best, index = torch.where(wins, view, best), torch.where(wins, i, index)
    assert best is not None
    assert index is not None
    return best, SelectedIndices(index, index)


def median(x: Tensor, windows: PoolWindows) -> tuple[Tensor, SelectedIndices]:
    """Return the median of each window, and the indices of the middle elements, by their ranks."""
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
