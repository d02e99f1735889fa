"""Average pooling that stores nothing for backward; padding counts as zeros, as in nn.AvgPool3d.

torch's own stores its input and has no half precision on CPUs.
"""

from torch import nn

from unet3d.pool.operators import Pool3d


class AvgPool3d(Pool3d):
    """Average pooling with the arguments of nn.MaxPool3d."""

    pool = "avg"

    def to_standard_operators(self) -> nn.Module:
        return nn.AvgPool3d(*self.windows.axes)
