"""Max pooling with the values and gradients of nn.MaxPool3d that stores one byte per output.

torch stores the input and an int64 per output; this stores one byte (see argmax_codes.py), and its
backward uses no atomics. Of equal elements the first is selected; NaN is greater than any number.
"""

from torch import Tensor, nn

from unet3d.pool.layout import to_supported_layout
from unet3d.pool.reference import maximum
from unet3d.pool.selection import define_selection_op, recompute_gradient
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

    def compute_input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of x, given that of the output."""
        return recompute_gradient(max_pool3d, "max", x, grad, self.windows)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return str(self.windows)


max_pool3d = define_selection_op("max", maximum)
