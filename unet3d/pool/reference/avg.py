"""Reference average pooling. Padding counts as zeros, as in nn.AvgPool3d."""

from collections.abc import Sequence

import torch
from torch import Tensor

from unet3d.pool.windows import PoolWindows


def average(x: Tensor, windows: PoolWindows) -> Tensor:
    """Return the mean of each window."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    total = torch.zeros((), dtype=values.dtype, device=x.device)
    for view in windows.views(values, fill=0):
        total = total + view
    return (total / windows.elements).to(x.dtype)


def average_gradient(grad: Tensor, shape: Sequence[int], windows: PoolWindows) -> Tensor:
    """Return the gradient of the input."""
    share = grad.to(torch.promote_types(grad.dtype, torch.float32)) / windows.elements
    return windows.scatter_add(shape, (share for _ in range(windows.elements))).to(grad.dtype)
