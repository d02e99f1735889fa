"""Approximate median pooling: a smooth median that becomes exact as tau -> 0, ties included.

For each of the two exact middle values s of a window it takes a soft mean, sum_i w_i x_i with
w = softmax(-|x_i - s| / tau), and returns the mean of both. It differs from the exact median by at
most 0.72 tau for K = 8 and 1.30 tau for K = 27 elements: tests/pool/test_approx_median.py says why.
Backward recomputes it and stores only the input.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.custom_ops import custom_op
from unet3d.errors import UsageError
from unet3d.pool.kernels import dispatch
from unet3d.pool.layout import (
    allocate_outputs,
    get_memory_format,
    is_channels_last,
    make_empty_like,
    to_supported_layout,
)
from unet3d.pool.reference import approx_median, approx_median_gradient
from unet3d.pool.windows import PoolWindows
from unet3d.types import Size


class ApproxMedianPool3d(nn.Module):
    """Approximate median pooling; `tau` is in the units of the features."""

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, *, tau: float = 0.1
    ):
        super().__init__()
        if not tau > 0:
            raise UsageError(
                f"tau must be greater than 0, got {tau}: the median pooling is the limit tau -> 0"
            )
        self.windows = PoolWindows.from_args(kernel_size, stride, padding)
        self.tau = float(tau)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W')."""
        return approx_median_pool3d(to_supported_layout(x), *self.windows.axes, self.tau)

    def compute_input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of x, given that of the output."""
        x = to_supported_layout(x)
        grad = grad.contiguous(memory_format=get_memory_format(is_channels_last(x)))
        return approx_median_pool3d_backward(grad, x, *self.windows.axes, self.tau)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"{self.windows}, tau={self.tau}"


@custom_op("unet3d::approx_median_pool3d")
def approx_median_pool3d(
    x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], tau: float
) -> Tensor:
    """Return the smooth medians."""
    windows = PoolWindows.from_args(size, stride, padding)
    if kernels := dispatch.select_kernels(x):
        return kernels.forward(x, "approx_median", windows, tau)[0]
    y = approx_median(x, windows, tau)
    return y.contiguous(memory_format=get_memory_format(is_channels_last(x)))


@approx_median_pool3d.register_fake
def _(x: Tensor, *options: Any) -> Tensor:
    *axes, _ = options
    return allocate_outputs(x, "approx_median", PoolWindows.from_args(*axes))[0]


@custom_op("unet3d::approx_median_pool3d_backward")
def approx_median_pool3d_backward(
    grad: Tensor,
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    tau: float,
) -> Tensor:
    """Return the gradient of the input, recomputed from the input."""
    windows, last = PoolWindows.from_args(size, stride, padding), is_channels_last(x)
    if kernels := dispatch.select_kernels(x):
        return kernels.backward(grad, "approx_median", windows, x.shape, last, x=x, tau=tau)
    result = approx_median_gradient(grad, x, windows, tau)
    return result.contiguous(memory_format=get_memory_format(last))


@approx_median_pool3d_backward.register_fake
def _(grad: Tensor, x: Tensor, *options: Any) -> Tensor:
    return make_empty_like(x.shape, grad, is_channels_last(x))


def _context(ctx, inputs: tuple, output: Tensor) -> None:
    x, *ctx.windows, ctx.tau = inputs
    ctx.save_for_backward(x)


def _gradient(ctx, grad: Tensor) -> tuple:
    (x,) = ctx.saved_tensors
    grad = grad.contiguous(memory_format=get_memory_format(is_channels_last(x)))
    return approx_median_pool3d_backward(grad, x, *ctx.windows, ctx.tau), *[None] * 4


def _backward_context(ctx, inputs: tuple, output: Tensor) -> None:
    grad, x, *ctx.windows, ctx.tau = inputs
    ctx.save_for_backward(grad, x)


def _second_gradient(ctx, upper: Tensor) -> tuple:
    """Differentiate the reference twice: second derivatives are too rare for a kernel."""
    windows = PoolWindows.from_args(*ctx.windows)
    with torch.enable_grad():
        grad, x = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        y = approx_median(x, windows, ctx.tau)
        (first,) = torch.autograd.grad(y, x, grad, create_graph=True)
        to_grad, to_x = torch.autograd.grad(first, (grad, x), upper)
    return to_grad, to_x, *[None] * 4


approx_median_pool3d.register_autograd(_gradient, setup_context=_context)
approx_median_pool3d_backward.register_autograd(_second_gradient, setup_context=_backward_context)
