"""Exact median pooling; the median of an even number of elements is the mean of the middle two.

Padding is not counted: a window at the border has the median of its elements inside the volume. A
window with NaN gives NaN. Each of the two middle elements receives half of the gradient; of equal
elements the one with the lower index comes first, as in a stable sort. Backward stores one byte per
output (two for large windows, see argmax_codes.py), not the input.
"""

from torch import Tensor, nn

from unet3d.pool.layout import to_supported_layout
from unet3d.pool.reference import median
from unet3d.pool.selection import define_selection_op, recompute_gradient
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

    def compute_input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of x, given that of the output."""
        return recompute_gradient(median_pool3d, "median", x, grad, self.windows)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return str(self.windows)


median_pool3d = define_selection_op("median", median)
