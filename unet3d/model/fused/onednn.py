"""Compute small float32 convolutions on a CPU with oneDNN.

For one volume of which B x C x D x H is at most 20480, PyTorch takes matrix products of unfolded
windows instead, which take several times as long. A tile of a large volume is often that small.
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from unet3d.custom_ops import get_device_type

LARGEST = 20480
"""B x C x D x H up to which PyTorch does not take oneDNN (aten/src/ATen/native/Convolution.cpp)."""

SMALLEST_NUMEL = 2**12
"""Elements from which oneDNN is faster."""


def needs_onednn(x: Tensor) -> bool:
    """Return whether oneDNN has to be asked for."""
    return (
        type(x) in (Tensor, FakeTensor)
        and get_device_type(x) == "cpu"
        and x.dtype == torch.float32
        and len(x) == 1
        and prod(x.shape[:4]) <= LARGEST
        and x.numel() >= SMALLEST_NUMEL
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def convolve(
    x: Tensor, weight: Tensor, padding: Sequence[int], stride: Sequence[int] = (1, 1, 1)
) -> Tensor:
    """Return the convolution of channels-last tensors."""
    if not needs_onednn(x):
        return F.conv3d(x, weight, None, list(stride), list(padding))
    if isinstance(x, FakeTensor):  # only its memory counts: oneDNN's result is channels-last
        y = F.conv3d(x, weight, None, list(stride), list(padding))
        _, c, d, h, w = y.shape
        return y.as_strided(y.shape, (c * d * h * w, 1, h * w * c, w * c, c))
    stride, ones = list(stride), [1, 1, 1]
    return torch.ops.aten.mkldnn_convolution(x, weight, None, list(padding), stride, ones, 1)


def prepare_input(x: Tensor) -> Tensor:
    """Return the input of a weight's gradient, as a copy in oneDNN's layout where that is faster.

    A fake tensor has no layouts; its copy has the same size.
    """
    if not needs_onednn(x):
        return x
    return x.clone() if isinstance(x, FakeTensor) else x.to_mkldnn()
