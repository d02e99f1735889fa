"""The exact median of each window; an even window gives the mean of its two middle values.

Elements that padding adds are not counted: a window at the border has the median of what is inside
the volume. A window that holds NaN gives NaN. Each of the two middle elements receives half of the
gradient; among equals the place in the window decides which they are, as in a stable sort. One byte
per output is kept for backward (see codes.py; two for large windows), and the input is not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unet3d.pool.argmax_codes import choose_code, encode
from unet3d.pool.kernels import dispatch
from unet3d.pool.layout import (
    allocate_outputs,
    is_channels_last,
    memory_format,
    to_supported_layout,
)
from unet3d.pool.reference.median import median
from unet3d.pool.select_backward import selection_backward, selection_context
from unet3d.pool.windows import Windows
from unet3d.types import Size


class MedianPool3d(nn.Module):
    """Median pooling, called as nn.MaxPool3d is."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0):
        super().__init__()
        self.windows = Windows.from_args(kernel_size, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W')."""
        return median_pool3d(to_supported_layout(x), *self.windows.axes)[0]

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return str(self.windows)


@torch.library.custom_op("unet3d::median_pool3d", mutates_args=())
def median_pool3d(
    x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The medians, and the places of the elements that they come from."""
    windows = Windows.from_args(size, stride, padding)
    if fast := dispatch.select_kernels(x):
        return fast.forward(x, "median", windows)
    y, places = median(x, windows)
    format = memory_format(is_channels_last(x))
    recorded = encode(places, choose_code("median", windows), windows, x.shape)
    return y.contiguous(memory_format=format), recorded.contiguous(memory_format=format)


@median_pool3d.register_fake
def _(
    x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return allocate_outputs(x, "median", Windows.from_args(size, stride, padding))


median_pool3d.register_autograd(selection_backward("median"), setup_context=selection_context)
