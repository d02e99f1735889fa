"""The poolings in plain PyTorch, also the fallback; the other kernels are tested against them.

Functions compute in float32 or float64; autograd can differentiate them.
"""

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from unet3d.custom_ops import upcast
from unet3d.pool.argmax_codes import SelectedIndices, choose_code, decode, encode
from unet3d.pool.windows import PoolWindows


def forward(
    x: Tensor, y: Tensor, codes: Tensor, pool: str, windows: PoolWindows, tau: float
) -> None:
    """Write the output and the codes of the selected elements."""
    shape, x = x.shape, upcast(x)
    if pool == "avg":
        y.copy_(reduce(torch.add, windows.views(x, fill=0)) / windows.elements)
    elif pool == "approx_median":
        y.copy_(approx_median(x, windows, tau))
    else:
        values, indices = maximum(x, windows) if pool == "max" else median(x, windows)
        y.copy_(values)
        codes.copy_(encode(indices, choose_code(pool, windows), windows, shape))


def backward(
    grad: Tensor, saved: Tensor | None, result: Tensor, pool: str, windows: PoolWindows, tau: float
) -> None:
    """Write the gradient of the input."""
    result.copy_(compute_gradient(grad, saved, pool, windows, result.shape, tau))


def compute_gradient(
    grad: Tensor,
    saved: Tensor | None,
    pool: str,
    windows: PoolWindows,
    shape: Sequence[int],
    tau: float,
) -> Tensor:
    """Return the gradient of an input of this shape."""
    grad = upcast(grad)
    if pool == "avg":
        parts = [grad / windows.elements] * windows.elements
    elif pool == "approx_median":
        assert saved is not None
        parts = grad / 2 * differentiate_approx_median(upcast(saved), windows, tau)
    else:
        assert saved is not None
        indices = decode(saved, choose_code(pool, windows), windows, shape)
        parts = send_to_selected(grad, indices, windows.elements)
    return windows.scatter_add(grad.new_zeros(shape), parts)


def maximum(x: Tensor, windows: PoolWindows) -> tuple[Tensor, SelectedIndices]:
    """Return the maximum of each window and the index that nn.MaxPool3d selects.

    It is the first of equal elements; NaN wins, and the last NaN over others.
    """
    best, index = x.new_zeros(()), torch.full((), -1, dtype=torch.int16, device=x.device)
    masks = windows.valid_masks(x)
    for i, view in enumerate(windows.views(x, fill=0)):
        wins = ((view > best) | view.isnan() | (index < 0)) & masks[i]
        best, index = torch.where(wins, view, best), torch.where(wins, i, index)
    return best, SelectedIndices(index, index)


def median(x: Tensor, windows: PoolWindows) -> tuple[Tensor, SelectedIndices]:
    """Return the median of each window, and the indices of the middle elements, by their ranks."""
    indices = select_middle(x, windows)
    low, high = (gather_at(x, windows, index) for index in indices)
    return (low / 2 + high / 2).masked_fill(has_nan(x, windows), torch.nan), indices


@torch.no_grad()
def select_middle(x: Tensor, windows: PoolWindows) -> SelectedIndices:
    """Return the indices of the lower and upper middle element of each window.

    An element's rank is its position in a stable sort; padding sorts last. A window with NaN has no
    ranks: its first element inside the volume is selected, and its second where two are needed.
    """
    nan, masks = has_nan(x, windows), windows.valid_masks(x)
    views = [view.masked_fill(nan, 0) for view in windows.views(x, fill=torch.inf)]
    ranks = [torch.zeros(nan.shape, dtype=torch.int16, device=x.device) for _ in views]
    for j, b in enumerate(views):
        for i, a in enumerate(views[:j]):
            first = (a <= b) & masks[i] | ~masks[j]
            ranks[j] += first
            ranks[i] += ~first
    count = torch.stack(masks).sum(0)  # elements inside the volume
    lower, upper = (
        torch.where(nan, 0, (count - 1) // 2),
        torch.where(nan, 1 - count % 2, count // 2),
    )
    low = high = torch.zeros((), dtype=torch.int16, device=x.device)
    for i, rank in enumerate(ranks):
        low, high = torch.where(rank == lower, i, low), torch.where(rank == upper, i, high)
    return SelectedIndices(low, high)


def gather_at(x: Tensor, windows: PoolWindows, indices: Tensor) -> Tensor:
    """Return the element at `indices` of each window."""
    values = x.new_zeros(indices.shape)
    for i, view in enumerate(windows.views(x, fill=0)):
        values = torch.where(indices == i, view, values)
    return values


def has_nan(x: Tensor, windows: PoolWindows) -> Tensor:
    """Return which windows hold NaN."""
    return reduce(torch.logical_or, (view.isnan() for view in windows.views(x, fill=0)))


def send_to_selected(grad: Tensor, indices: SelectedIndices, elements: int) -> Iterator[Tensor]:
    """Yield the gradient of each of the K elements: all for a single one, half for each of two."""
    low, high = indices
    share = torch.where(low == high, grad, grad / 2)
    for i in range(elements):
        yield torch.where((low == i) | (high == i), share, 0)


def approx_median(x: Tensor, windows: PoolWindows, tau: float) -> Tensor:
    """Return the mean of the soft means around both middle values."""
    means = []
    for index in select_middle(x, windows):
        middle = gather_at(x, windows, index)
        weights, distances = weigh(x, windows, middle, tau)
        means.append(middle + (weights * distances).sum(0))
    return (means[0] / 2 + means[1] / 2).masked_fill(has_nan(x, windows), torch.nan)


def differentiate_approx_median(x: Tensor, windows: PoolWindows, tau: float) -> Tensor:
    """Return the derivatives of both soft means by each element, added: (K, B, C, D', H', W').

    With d = x_i - s, w the weight of x_i and o the soft mean's offset from s, the derivative of
    that mean by x_i is w - p, and by s the sum of p, for p = w (d - o) sign(d) / tau.
    """
    positions = torch.arange(windows.elements, device=x.device).view(-1, 1, 1, 1, 1, 1)
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for index in select_middle(x, windows):
        weights, distances = weigh(x, windows, gather_at(x, windows, index), tau)
        offset = (weights * distances).sum(0)
        pull = weights * (distances - offset) * distances.sign() / tau
        total = total + weights - pull + torch.where(positions == index, pull.sum(0), 0)
    return total


def weigh(x: Tensor, windows: PoolWindows, middle: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return the elements' weights, and their distances from the middle: (K, B, C, D', H', W')."""
    elements = torch.stack(list(windows.views(x, fill=0)))
    masks = torch.stack(windows.valid_masks(x))[:, None, None]
    # Avoid inf - inf: the distance of an infinity from itself is 0.
    distances = torch.where(elements.isinf() & (elements == middle), 0, elements - middle)
    weights = torch.exp(-distances.abs() / tau) * masks
    return weights / weights.sum(0), torch.where(weights > 0, distances, 0)
