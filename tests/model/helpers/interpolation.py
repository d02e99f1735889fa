"""Interpolate and differentiate three rows at a time, with torch's results for the whole map."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.model.fused.ops import upsample_ops


class Interpolated(NamedTuple):
    result: Tensor
    gradient: Tensor
    expected: Tensor
    expected_gradient: Tensor


def interpolate_in_parts(
    low: Tensor, factors: tuple[int, int, int], *, linear: bool
) -> Interpolated:
    """Return both results, and the gradients of `low` for one random gradient of them."""
    low.requires_grad_()
    mode, corners = ("trilinear", True) if linear else ("nearest", None)
    scale = [float(factor) for factor in factors]
    expected = F.interpolate(low, scale_factor=scale, mode=mode, align_corners=corners)
    upper = torch.randn_like(expected)
    expected.backward(upper)
    assert low.grad is not None
    small = low.detach()
    result, gradient = torch.empty_like(expected), torch.zeros_like(small)
    (d, h, w), (rows, height, width) = small.shape[2:], expected.shape[2:]
    for first in range(0, rows, 3):
        last = min(first + 3, rows)
        axes = [first, rows, 0, d, 0, height, 0, h, 0, width, 0, w]
        upsample_ops.interpolate(small, axes, linear, result[:, :, first:last])
        upsample_ops.interpolate_gradient(upper[:, :, first:last], axes, linear, gradient)
    return Interpolated(result, gradient, expected.detach(), low.grad)
