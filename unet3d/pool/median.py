"""Exact median pooling; the median of an even number of elements is the mean of the middle two.

Padding is not counted: a window at the border has the median of its elements inside the volume. A
window with NaN gives NaN. Each of the two middle elements receives half of the gradient; of equal
elements the one with the lower index comes first, as in a stable sort. Backward stores one byte per
output (two for large windows, see argmax_codes.py), not the input.
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
from unet3d.pool.reference.median import median
from unet3d.pool.select_backward import make_selection_backward, setup_selection_context
from unet3d.pool.windows import PoolWindows
from unet3d.types import Size


class MedianPool3d(nn.Module):
    """Median pooling with the arguments of nn.MaxPool3d."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0):
        super().__init__()
        self.windows = PoolWindows.from_args(kernel_size, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W')."""
        return median_pool3d(to_supported_layout(x), *self.windows.axes)[0]

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return str(self.windows)


@torch.library.custom_op("unet3d::median_pool3d", mutates_args=())
def median_pool3d(
    x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the medians and the codes of the selected elements."""
    windows = PoolWindows.from_args(size, stride, padding)
    if kernels := dispatch.select_kernels(x):
        return kernels.forward(x, "median", windows)
    y, indices = median(x, windows)
    format = get_memory_format(is_channels_last(x))
    codes = encode(indices, choose_code("median", windows), windows, x.shape)
    return y.contiguous(memory_format=format), codes.contiguous(memory_format=format)


@median_pool3d.register_fake
def _(
    x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return allocate_outputs(x, "median", PoolWindows.from_args(size, stride, padding))


median_pool3d.register_autograd(
    make_selection_backward("median"), setup_context=setup_selection_context
)
