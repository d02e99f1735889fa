"""Max pooling with the values and gradients of nn.MaxPool3d that stores one byte per output.

torch stores the input and an int64 per output; this stores one byte (see argmax_codes.py), and its
backward uses no atomics. Of equal elements the first is selected; NaN is greater than any number.
"""

import torch.nn.functional as F
from torch import Tensor

from unet3d.pool.operators import Pool3d


class MaxPool3d(Pool3d):
    """Max pooling with the arguments of nn.MaxPool3d."""

    pool = "max"

    def pool_by_standard_operators(self, x: Tensor) -> Tensor:
        return F.max_pool3d(x, *self.windows.axes)
