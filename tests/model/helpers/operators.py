"""Compare what the kernels of fused blocks and plain PyTorch compute."""

import copy
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.model.fused import norms, operators
from unet3d.model.fused.kernels import cuda


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
    numbers = scale, shift, mean, rstd = [torch.randn(shape[:2]) for _ in range(4)]
    normalized, over_g, over_y = torch.empty_like(y), g.clone(), y.clone()
    operators.normalize([y], [scale], [shift], [slope], False, normalized)
    added = normalized.clone()
    terms = [y, g, y], [scale, mean, shift], [shift, rstd, scale], [slope, 1.0, slope]
    operators.normalize(*terms, True, added)
    operators.norm_gradient(over_g, y, *numbers, slope, over_g)
    operators.norm_gradient(g, over_y, *numbers, slope, over_y)
    moments, sums = operators.make_sums(y), operators.make_sums(y)
    for n, rows in enumerate((y, y + 1)):
        # far from zero, where sums of squares cancel
        operators.add_moments(3 * rows + 50, n * y[0, 0].numel(), moments)
        operators.add_norm_gradient_sums(g, rows, scale, shift, mean, rstd, slope, not n, sums)
    return [normalized, added, over_g, over_y], [moments, sums]


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
    select, results = operators.select_kernels, []
    for chosen in (kernels, None):
        operators.select_kernels = lambda *_, chosen=chosen: chosen  # ty: ignore[invalid-assignment]
        results.append(run_norm_ops(shape, dtype, slope, part=part))
    operators.select_kernels = select
    (maps, sums), (expected_maps, expected_sums) = results
    eps = tolerance * torch.finfo(dtype).eps
    torch.testing.assert_close(maps, expected_maps, rtol=2 * eps, atol=8 * eps)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-4, atol=1e-4 * tolerance)


def compare_interpolation(
    low: Tensor, factors: tuple[int, int, int], *, linear: bool, tolerance: float = 1e-5
) -> None:
    """Assert that three rows at a time have torch's results for the whole map, and gradients."""
    low.requires_grad_()
    mode, corners = ("trilinear", True) if linear else ("nearest", None)
    scale = [float(factor) for factor in factors]
    expected = F.interpolate(low, scale_factor=scale, mode=mode, align_corners=corners)
    upper = torch.randn_like(expected)
    expected.backward(upper)
    small = low.detach()
    result, gradient = torch.empty_like(expected), torch.zeros_like(small)
    (d, h, w), (rows, height, width) = small.shape[2:], expected.shape[2:]
    for first in range(0, rows, 3):
        last = min(first + 3, rows)
        axes = [first, rows, 0, d, 0, height, 0, h, 0, width, 0, w]
        operators.interpolate(small, axes, linear, result[:, :, first:last])
        operators.interpolate_gradient(upper[:, :, first:last], axes, linear, gradient)
    torch.testing.assert_close(result, expected.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, low.grad, rtol=tolerance, atol=tolerance)


def compare_statistics(norm: nn.Module) -> None:
    """Assert that kernels fold statistics, and their gradient, as plain PyTorch does."""
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    bias, voxels, results = torch.randn(6), 9 * 10 * 11, []
    y, g = (make_map((3, 6, 9, 10, 11), torch.float32, part=False) for _ in range(2))
    merges = not isinstance(norm, nn.GroupNorm)
    for unmerged in (voxels if merges else 0, 0, None):  # None: without kernels
        kernels = None if unmerged is None else cuda
        norms.runs_triton = lambda *_, value=kernels is not None: value  # ty: ignore[invalid-assignment]
        operators.select_kernels = lambda *_, kernels=kernels: kernels  # ty: ignore[invalid-assignment]
        module, like, moments = copy.deepcopy(norm), torch.empty(3, 6), norms.Moments(unmerged or 0)
        groups = norms.make_stat_groups(module, 6)
        moments.add(y + 5)
        assert (len(moments.total) > 1) == bool(unmerged)
        folded = norms.fold_norm(module, nn.ReLU(), bias, groups, moments, like)
        gradient = folded.gradient(folded.add_gradient_sums(g, y + 5, None))
        values = (*vars(folded).values(), *vars(gradient).values(), *module.buffers())
        results.append([x for x in values if isinstance(x, Tensor)])
    torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[1], results[2], rtol=1e-4, atol=1e-4)


def main() -> None:
    """Compare the Triton kernels; run with TRITON_INTERPRET=1, read when kernels are defined."""
    for shape in [(2, 5, 4, 3, 7), (1, 70, 2, 3, 5), (2, 1, 4, 4, 4), (1, 16, 9, 8, 5)]:
        for dtype, slope in ((torch.float32, 0.01), (torch.float16, 0.0)):
            compare_norm_ops(cuda, shape, dtype, slope, part=True, tolerance=10)
    compare_statistics(nn.BatchNorm3d(6))
    compare_statistics(nn.BatchNorm3d(6, affine=False, track_running_stats=False))
    compare_statistics(nn.InstanceNorm3d(6, affine=True))
    compare_statistics(nn.GroupNorm(2, 6))
    operators.select_kernels = lambda *_: cuda  # ty: ignore[invalid-assignment]
    for factors, size in [((2, 2, 2), (4, 3, 6)), ((1, 2, 3), (3, 1, 2)), ((2, 1, 2), (2, 5, 7))]:
        for linear in (True, False):
            low = make_map((2, 5, *size), torch.float32, part=False)
            compare_interpolation(low, factors, linear=linear, tolerance=1e-4)


if __name__ == "__main__":
    main()
