"""Convolve channels-last tensors, and compute the gradients of input and weight.

For one volume of which B x C x D x H is at most 20480, PyTorch takes matrix products of unfolded
windows on a CPU instead of oneDNN, which take several times as long. A tile of a large volume is
often that small, so oneDNN is asked for.
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.grad import conv3d_input, conv3d_weight

from unet3d.custom_ops import get_device_type

MAX_NATIVE_NUMEL = 20480
"""B x C x D x H up to which PyTorch does not take oneDNN (aten/src/ATen/native/Convolution.cpp)."""

SMALLEST_NUMEL = 2**12
"""Elements from which oneDNN is faster."""


def cast_weight(weight: Tensor, dtype: torch.dtype, *, transpose: bool = False) -> Tensor:
    """Return a weight in the dtype of the step, channels-last as maps are.

    With `transpose`, exchange its inputs and outputs.
    """
    weight = weight.detach()
    if transpose:
        weight = weight.transpose(0, 1)
    return weight.to(dtype=dtype, memory_format=torch.channels_last_3d)


def cast_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a bias in the dtype of the step, if there is one."""
    return None if bias is None else bias.detach().to(dtype)


def needs_onednn(x: Tensor) -> bool:
    """Return whether oneDNN has to be asked for."""
    return (
        type(x) in (Tensor, FakeTensor)
        and get_device_type(x) == "cpu"
        and x.dtype == torch.float32
        and len(x) == 1
        and prod(x.shape[:4]) <= MAX_NATIVE_NUMEL
        and x.numel() >= SMALLEST_NUMEL
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def convolve(
    x: Tensor, weight: Tensor, padding: Sequence[int], stride: Sequence[int] = (1, 1, 1)
) -> Tensor:
    """Convolve and return channels-last, which some of torch's kernels for small inputs do not."""
    padding, stride = list(padding), list(stride)
    if not needs_onednn(x):
        y = F.conv3d(x, weight, None, stride, padding)
    elif isinstance(x, FakeTensor):  # only its memory counts: oneDNN's result is channels-last
        y = F.conv3d(x, weight, None, stride, padding)
        _, c, d, h, w = y.shape
        y = y.as_strided(y.shape, (c * d * h * w, 1, h * w * c, w * c, c))
    else:
        y = torch.ops.aten.mkldnn_convolution(x, weight, None, padding, stride, [1, 1, 1], 1)
    return y.contiguous(memory_format=torch.channels_last_3d)


def is_short(map_shape: Sequence[int], weight_shape: Sequence[int]) -> bool:
    """Return whether oneDNN leaves parts of a bf16 weight gradient uninitialized (torch 2.14)."""
    return map_shape[2] < weight_shape[2] or map_shape[3] < weight_shape[3] // 2


def compute_input_gradient(
    g: Tensor, shape: torch.Size, weight: Tensor, padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Return the gradient of a convolution's input of this shape."""
    g = g.contiguous(memory_format=torch.channels_last_3d)
    return conv3d_input(shape, weight, g, stride, padding)


def compute_weight_gradient(
    g: Tensor,
    x: Tensor,
    shape: torch.Size,
    padding: Sequence[int],
    stride: Sequence[int] = (1, 1, 1),
    *,
    contiguous: bool = False,
) -> Tensor:
    """Return the gradient of a convolution's weight of this shape, at least in float32.

    `contiguous` gives it the layout of the parameter, which autograd would copy it to.
    """
    g = g.contiguous(memory_format=torch.channels_last_3d)
    if g.device.type == "cpu" and g.dtype == torch.bfloat16 and is_short(x.shape, shape):
        g, x = g.float(), x.float()
    if needs_onednn(x):  # faster in its layout; a fake tensor has no layouts, but the same size
        x = x.clone() if isinstance(x, FakeTensor) else x.to_mkldnn()
    gradient = conv3d_weight(x, shape, g, stride, padding)
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    layout = torch.contiguous_format if contiguous else torch.preserve_format
    return gradient.to(dtype=dtype, memory_format=layout)
