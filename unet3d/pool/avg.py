"""Average pooling that stores nothing for backward; padding counts as zeros, as in nn.AvgPool3d.

torch's own stores its input and has no half precision on CPUs.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from unet3d.custom_ops import custom_op
from unet3d.pool.kernels import dispatch
from unet3d.pool.layout import (
    allocate_outputs,
    get_memory_format,
    has_channels_last_strides,
    is_channels_last,
    make_empty_like,
    to_supported_layout,
)
from unet3d.pool.reference import average, average_gradient
from unet3d.pool.windows import PoolWindows
from unet3d.types import Size


class AvgPool3d(nn.Module):
    """Average pooling with the arguments of nn.MaxPool3d."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0):
        super().__init__()
        self.windows = PoolWindows.from_args(kernel_size, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W')."""
        return avg_pool3d(to_supported_layout(x), *self.windows.axes)

    def compute_input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of x, given that of the output."""
        last = is_channels_last(x) or has_channels_last_strides(x)
        grad = grad.contiguous(memory_format=get_memory_format(last))
        return avg_pool3d_backward(grad, x.shape, *self.windows.axes, last)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return str(self.windows)


@custom_op("unet3d::avg_pool3d")
def avg_pool3d(
    x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Return the means."""
    windows = PoolWindows.from_args(size, stride, padding)
    if kernels := dispatch.select_kernels(x):
        return kernels.forward(x, "avg", windows)[0]
    return average(x, windows).contiguous(memory_format=get_memory_format(is_channels_last(x)))


@avg_pool3d.register_fake
def _(x: Tensor, *axes: Sequence[int]) -> Tensor:
    return allocate_outputs(x, "avg", PoolWindows.from_args(*axes))[0]


@custom_op("unet3d::avg_pool3d_backward")
def avg_pool3d_backward(
    grad: Tensor,
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    channels_last: bool,
) -> Tensor:
    """Return the gradient of the input."""
    windows = PoolWindows.from_args(size, stride, padding)
    if kernels := dispatch.select_kernels(grad):
        return kernels.backward(grad, "avg", windows, shape, channels_last)
    format = get_memory_format(channels_last)
    return average_gradient(grad, shape, windows).contiguous(memory_format=format)


@avg_pool3d_backward.register_fake
def _(grad: Tensor, shape: Sequence[int], *options: Any) -> Tensor:
    return make_empty_like(shape, grad, options[-1])  # channels_last


def _context(ctx, inputs: tuple, output: Tensor) -> None:
    x, *ctx.windows = inputs
    ctx.shape, ctx.channels_last = x.shape, is_channels_last(x)


def _gradient(ctx, grad: Tensor) -> tuple:
    grad = grad.contiguous(memory_format=get_memory_format(ctx.channels_last))
    return avg_pool3d_backward(grad, ctx.shape, *ctx.windows, ctx.channels_last), None, None, None


def _backward_context(ctx, inputs: tuple, output: Tensor) -> None:
    _, _, *ctx.windows, ctx.channels_last = inputs


def _second_gradient(ctx, grad: Tensor) -> tuple:
    # Backward is the transpose of the mean, so its own derivative is the mean.
    grad = grad.contiguous(memory_format=get_memory_format(ctx.channels_last))
    return avg_pool3d(grad, *ctx.windows), *[None] * 5


avg_pool3d.register_autograd(_gradient, setup_context=_context)
avg_pool3d_backward.register_autograd(_second_gradient, setup_context=_backward_context)
