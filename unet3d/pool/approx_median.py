"""A smooth median with a temperature: exact as tau -> 0, ties included.

Around each of the two exact middle values s of a window stands a soft mean, sum_i w_i x_i with
w = softmax(-|x_i - s| / tau); the result is the mean of both. It differs from the exact median by
at most 0.72 tau for K = 8 and 1.31 tau for K = 27 elements. Only the input is kept for backward.
"""

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unet3d.pool.median import middles, take
from unet3d.pool.windows import Windows
from unet3d.types import Misuse, Size


class ApproxMedianPool3d(nn.Module):
    """Approximate median pooling; `tau` is in the units of the features."""

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, *, tau: float = 0.1
    ):
        super().__init__()
        if not tau > 0:
            raise Misuse(f"pool.tau must be above 0, got {tau}; pool=median is the limit tau -> 0")
        self.windows = Windows.of(kernel_size, stride, padding)
        self.tau = tau

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W')."""
        return _ApproxMedian.apply(x, self.windows, self.tau)

    def extra_repr(self) -> str:
        w = self.windows
        return f"kernel_size={w.size}, stride={w.stride}, padding={w.padding}, tau={self.tau}"


def soft_median(x: Tensor, windows: Windows, tau: float) -> Tensor:
    """The definition, in differentiable operations; inside in float32 at least."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    with torch.no_grad():
        places = middles(values, windows)
    inside = windows.inside(values)
    result = torch.zeros((), dtype=values.dtype, device=x.device)
    for place in places:
        middle = take(values, windows, place)
        total, weighted = torch.zeros_like(middle), torch.zeros_like(middle)
        for i, view in enumerate(windows.views(values, fill=0)):
            weight = torch.exp(-(view - middle).abs() / tau)
            if inside is not None:
                weight = weight * inside[i]
            total = total + weight
            weighted = weighted + weight * (view - middle)
        result = result + (middle + weighted / total) / 2
    return result.to(x.dtype)


class _ApproxMedian(Function):
    @staticmethod
    def forward(ctx, x: Tensor, windows: Windows, tau: float) -> Tensor:
        ctx.windows, ctx.tau = windows, tau
        ctx.save_for_backward(x)
        return soft_median(x, windows, tau)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = soft_median(x, ctx.windows, ctx.tau)
            return torch.autograd.grad(y, x, grad)[0], None, None
