"""Average pooling that stores nothing for backward; padding counts as zeros, as in nn.AvgPool3d.

torch's own stores its input and has no half precision on CPUs.
"""

import torch.nn.functional as F
from torch import Tensor

from unet3d.pool.operators import Pool3d


class AvgPool3d(Pool3d):
    """Average pooling with the arguments of nn.MaxPool3d."""

    pool = "avg"

    def pool_by_standard_operators(self, x: Tensor) -> Tensor:
        return F.avg_pool3d(x, *self.windows.axes)
