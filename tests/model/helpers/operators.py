"""Run the operators of fused blocks, to compare what their kernels and plain PyTorch compute."""

from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.model.fused.kernels import dispatch
from unet3d.model.fused.ops import norm_ops, upsample_ops


def make_map(shape: tuple[int, ...], dtype: torch.dtype, *, part: bool) -> Tensor:
    """Return a channels-last map, or some rows and channels of a larger one."""
    b, c, d, h, w = shape
    layout = {"memory_format": torch.channels_last_3d}
    if not part:
        return torch.randn(shape).to(dtype).contiguous(**layout)
    full = torch.randn(b, c + 3, d + 1, h + 2, w).to(dtype).contiguous(**layout)
    return full[:, 1 : c + 1, 1:, 1 : h + 1]


def run_norm_ops(
    shape: tuple[int, ...], dtype: torch.dtype, slope: float, *, part: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what each operator writes: maps, and sums of maps."""
    torch.manual_seed(0)
    y, g = (make_map(shape, dtype, part=part) for _ in range(2))
    numbers = scale, shift, mean, inverse = [torch.randn(shape[:2]) for _ in range(4)]
    normalized, masked, over_g, over_y = torch.empty_like(y), g.clone(), g.clone(), y.clone()
    norm_ops.normalize(y, scale, shift, slope, False, normalized)
    added = normalized.clone()
    norm_ops.normalize(y, scale, shift, slope, True, added)
    norm_ops.activation_gradient(y, slope, masked)
    norm_ops.gradient(over_g, y, *numbers, slope, over_g)
    norm_ops.gradient(g, over_y, *numbers, slope, over_y)
    moments, sums = norm_ops.make_sums(y), norm_ops.make_sums(y)
    for n, rows in enumerate((y, y + 1)):
        # far from zero, where sums of squares cancel
        norm_ops.add_moments(3 * rows + 50, n * y[0, 0].numel(), moments)
        norm_ops.add_gradient_sums(g, rows, scale, shift, mean, inverse, slope, not n, sums)
    return [normalized, added, masked, over_g, over_y], [moments, sums]


def compare_norm_ops(
    kernels: ModuleType,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    slope: float,
    *,
    part: bool,
    tolerance: float = 1.0,
) -> None:
    """Assert that kernels write what plain PyTorch writes."""
    select, results = dispatch.select_kernels, []
    for chosen in (kernels, None):
        dispatch.select_kernels = lambda *_, chosen=chosen: chosen  # ty: ignore[invalid-assignment]
        results.append(run_norm_ops(shape, dtype, slope, part=part))
    dispatch.select_kernels = select
    (maps, sums), (expected_maps, expected_sums) = results
    eps = tolerance * torch.finfo(dtype).eps
    torch.testing.assert_close(maps, expected_maps, rtol=2 * eps, atol=8 * eps)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-4, atol=1e-4 * tolerance)


class Interpolated(NamedTuple):
    result: Tensor
    gradient: Tensor
    expected: Tensor
    expected_gradient: Tensor


def interpolate_in_parts(
    low: Tensor, factors: tuple[int, int, int], *, linear: bool
) -> Interpolated:
    """Return three rows at a time, and torch's results for the whole map, with gradients."""
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
