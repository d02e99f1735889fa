"""Compare the Triton kernels of fused blocks, interpreted, with plain PyTorch.

A separate program, run with TRITON_INTERPRET=1: Triton reads that when kernels are defined.
"""

import copy
from types import ModuleType

import torch
from torch import Tensor, nn

from tests.model.helpers.interpolation import interpolate_in_parts
from unet3d.model.fused import norms
from unet3d.model.fused.kernels import cuda, dispatch
from unet3d.model.fused.ops import norm_ops, statistics_ops

SHAPES = [(2, 5, 4, 3, 7), (1, 70, 2, 3, 5), (2, 1, 4, 4, 4), (1, 16, 9, 8, 5)]
UPSAMPLINGS = [((2, 2, 2), (4, 3, 6)), ((1, 2, 3), (3, 1, 2)), ((2, 1, 2), (2, 5, 7))]
DTYPES = (torch.float32, torch.float16)


def volume(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return some rows and channels of a larger channels-last map."""
    b, c, d, h, w = shape
    full = torch.randn(b, c + 3, d, h + 2, w).to(dtype)
    full = full.contiguous(memory_format=torch.channels_last_3d)
    return full[:, 1 : c + 1, :, 1 : h + 1]


def run_norm_ops(
    shape: tuple[int, ...], dtype: torch.dtype, kernels: ModuleType | None
) -> list[Tensor]:
    """Return the result of every operator; `kernels=None` runs plain PyTorch."""
    dispatch.select_kernels = lambda *_: kernels  # ty: ignore[invalid-assignment]
    torch.manual_seed(0)
    y, g = volume(shape, dtype) + 20, volume(shape, dtype)
    numbers = [torch.randn(shape[:2]) for _ in range(4)]
    scale, shift, mean, inverse = numbers
    out, in_place = torch.empty_like(y), g.clone()
    norm_ops.normalize(y, scale, shift, 0.01, False, out)
    added, masked = out.clone(), g.clone()
    norm_ops.normalize(y, scale, shift, 0.01, True, added)
    norm_ops.activation_gradient(y - 20, 0.01, masked)
    norm_ops.gradient(in_place, y, scale, shift, mean, inverse, 0.0, in_place)
    moments, sums = norm_ops.make_sums(y), norm_ops.make_sums(y)
    for n, part in enumerate((y, y + 1)):
        norm_ops.add_moments(part, n * y[0, 0].numel(), moments)
        norm_ops.add_gradient_sums(g, part, scale, shift, mean + 20, inverse, 0.01, not n, sums)
    return [moments, out, in_place, added, masked, sums]


def check_norms() -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            results = run_norm_ops(shape, dtype, cuda)
            expected = run_norm_ops(shape, dtype, None)
            for n, (a, b) in enumerate(zip(results, expected, strict=True)):
                tolerance = 4 * torch.finfo(a.dtype).eps if n in (1, 2, 3, 4) else 1e-4
                options = {"rtol": max(tolerance, 1e-5), "atol": 20 * tolerance}
                torch.testing.assert_close(a, b, **options, msg=f"{shape}, {dtype}, {n}")


def check_statistics() -> None:
    """Compare folded statistics, and their gradient, with those of norms.py in plain PyTorch."""
    for norm in (
        nn.BatchNorm3d(6),
        nn.BatchNorm3d(6, affine=False, track_running_stats=False),
        nn.InstanceNorm3d(6, affine=True),
        nn.GroupNorm(2, 6),
    ):
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        bias, sums = torch.randn(6), torch.randn(2, 3, 6)
        moments = norms.Moments()
        moments.count, moments.total = 50, torch.rand(2, 3, 6) * 50
        results = []
        for has_kernels in (True, False):
            statistics_ops.has_kernels = lambda _, value=has_kernels: value  # ty: ignore[invalid-assignment]
            module = copy.deepcopy(norm)
            folded = norms.fold_norm(module, nn.ReLU(), bias, moments, torch.empty(3, 6))
            gradient = folded.gradient(sums)
            values = (*vars(folded).values(), *vars(gradient).values(), *module.buffers())
            results.append([x for x in values if isinstance(x, Tensor)])
        for n, (a, b) in enumerate(zip(*results, strict=True)):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=f"{norm}, {n}")


def check_interpolation() -> None:
    dispatch.select_kernels = lambda *_: cuda  # ty: ignore[invalid-assignment]
    for linear in (True, False):
        for factors, size in UPSAMPLINGS:
            low = torch.randn(2, 5, *size).contiguous(memory_format=torch.channels_last_3d)
            parts = interpolate_in_parts(low, factors, linear=linear)
            results = (parts.result, parts.expected), (parts.gradient, parts.expected_gradient)
            for a, b in results:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    check_norms()
    check_statistics()
    check_interpolation()
