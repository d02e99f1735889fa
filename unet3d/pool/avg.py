"""Average pooling in every precision, on every device."""

from torch import Tensor, nn

from unet3d.pool.windows import Windows
from unet3d.types import Size


class AvgPool3d(nn.Module):
    """The mean of each window, padding counted as zeros; called as nn.AvgPool3d is."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0):
        super().__init__()
        self.windows = Windows.of(kernel_size, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W')."""
        first, *rest = self.windows.views(x, fill=0)
        total = first.float() if first.element_size() < 4 else first
        for view in rest:
            total = total + view
        return (total / self.windows.elements).to(x.dtype)

    def extra_repr(self) -> str:
        w = self.windows
        return f"kernel_size={w.size}, stride={w.stride}, padding={w.padding}"
