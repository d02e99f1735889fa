"""Compute small float32 convolutions on a CPU with oneDNN.

For one volume of which B x C x D x H is at most 20480, PyTorch takes matrix products of unfolded
windows instead, which take several times as long. A tile of a large volume is often that small.
"""

from math import prod

import torch
from torch import Tensor

LARGEST = 20480
"""B x C x D x H up to which PyTorch does not take oneDNN (aten/src/ATen/native/Convolution.cpp)."""

SMALLEST_NUMEL = 2**12
"""Elements from which oneDNN is faster."""


def needs_onednn(x: Tensor) -> bool:
    """Return whether oneDNN has to be asked for."""
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and len(x) == 1
        and prod(x.shape[:4]) <= LARGEST
        and x.numel() >= SMALLEST_NUMEL
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )
