"""Max pooling with the values and gradients of nn.MaxPool3d that stores one byte per output.

torch stores the input and an int64 per output; this stores one byte (see argmax_codes.py), and its
backward uses no atomics. Of equal elements the first is selected; NaN is greater than any number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unet3d.pool.argmax_codes import choose_code, encode
from unet3d.pool.kernels import dispatch
from unet3d.pool.layout import (
    allocate_outputs,
    get_memory_format,
    is_channels_last,
    to_supported_layout,
)
from unet3d.pool.reference.max import maximum
from unet3d.pool.select_backward import make_selection_backward, setup_selection_context
from unet3d.pool.windows import PoolWindows
from unet3d.types import Size


class MaxPool3d(nn.Module):
    """Max pooling with the arguments of nn.MaxPool3d."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0):
        super().__init__()
        self.windows = PoolWindows.from_args(kernel_size, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W')."""
        return max_pool3d(to_supported_layout(x), *self.windows.axes)[0]

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return str(self.windows)


@torch.library.custom_op("unet3d::max_pool3d", mutates_args=())
def max_pool3d(
    x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the maxima and their codes."""
    windows = PoolWindows.from_args(size, stride, padding)
    if kernels := dispatch.select_kernels(x):
        return kernels.forward(x, "max", windows)
    y, indices = maximum(x, windows)
    format = get_memory_format(is_channels_last(x))
    codes = encode(indices, choose_code("max", windows), windows, x.shape)
    return y.contiguous(memory_format=format), codes.contiguous(memory_format=format)


@max_pool3d.register_fake
def _(
    x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return allocate_outputs(x, "max", PoolWindows.from_args(size, stride, padding))


max_pool3d.register_autograd(make_selection_backward("max"), setup_context=setup_selection_context)
