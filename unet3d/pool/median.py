"""The exact median of each window; an even window gives the mean of its two middle values.

Elements that padding adds are not counted: a window at the border has the median of what is inside
the volume. A window that holds NaN gives NaN. Each of the two middle elements receives half of the
gradient. Only their places in the window are kept for backward, not the input.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unet3d.pool.windows import Windows
from unet3d.types import Size


class MedianPool3d(nn.Module):
    """Median pooling, called as nn.MaxPool3d is."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0):
        super().__init__()
        self.windows = Windows.of(kernel_size, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W')."""
        return _Median.apply(x, self.windows)

    def extra_repr(self) -> str:
        w = self.windows
        return f"kernel_size={w.size}, stride={w.stride}, padding={w.padding}"


def middles(x: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """The places (0 .. K-1, D H W order) of the lower and the upper middle element of each window.

    An element's rank is the number of those before it in a stable sort; NaN and padding sort last.
    """
    views = list(windows.views(x, fill=torch.inf))
    inside = windows.inside(x)
    ranked = partial(torch.zeros, views[0].shape, dtype=torch.int16, device=x.device)
    count = ranked() + (windows.elements if inside is None else sum(v.short() for v in inside))
    low, high = ranked(), ranked()
    for i, a in enumerate(views):
        rank = ranked()
        for j, b in enumerate(views):
            if i == j:
                continue
            before = b <= a if j < i else b < a
            if inside is not None:
                before = before & inside[j] | ~inside[i]
            rank += before | a.isnan()
        low.masked_fill_(rank == (count - 1) // 2, i)
        high.masked_fill_(rank == count // 2, i)
    return low, high


def take(x: Tensor, windows: Windows, places: Tensor) -> Tensor:
    """The element at `places` of each window."""
    taken = x.new_zeros(places.shape)
    for i, view in enumerate(windows.views(x, fill=0)):
        taken = torch.where(places == i, view, taken)
    return taken


def has_nan(x: Tensor, windows: Windows) -> Tensor:
    """Which windows hold NaN."""
    return torch.stack([v.isnan() for v in windows.views(x, fill=0)]).any(0)


class _Median(Function):
    @staticmethod
    def forward(ctx, x: Tensor, windows: Windows) -> Tensor:
        low, high = middles(x, windows)
        ctx.windows, ctx.shape = windows, x.shape
        ctx.save_for_backward(low.to(torch.uint8), high.to(torch.uint8))
        y = take(x, windows, low) / 2 + take(x, windows, high) / 2
        return y.masked_fill(has_nan(x, windows), torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        low, high = ctx.saved_tensors
        pd, ph, pw = ctx.windows.padding
        b, c, d, h, w = ctx.shape
        padded = grad.new_zeros(b, c, d + 2 * pd, h + 2 * ph, w + 2 * pw)
        unpadded = Windows(ctx.windows.size, ctx.windows.stride, (0, 0, 0))
        for i, view in enumerate(unpadded.views(padded, fill=0)):
            view += grad / 2 * ((low == i).to(grad.dtype) + (high == i).to(grad.dtype))
        return padded[..., pd : pd + d, ph : ph + h, pw : pw + w], None
