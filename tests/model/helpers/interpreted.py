"""Compare the Triton kernels of fused blocks, interpreted, with plain PyTorch.

A separate program, run with TRITON_INTERPRET=1: Triton reads that when kernels are defined.
"""

import copy

import torch
from torch import Tensor, nn

from tests.model.helpers.operators import compare_norm_ops, interpolate_in_parts
from unet3d.model.fused import norms
from unet3d.model.fused.kernels import cuda, dispatch
from unet3d.model.fused.ops import statistics_ops

SHAPES = [(2, 5, 4, 3, 7), (1, 70, 2, 3, 5), (2, 1, 4, 4, 4), (1, 16, 9, 8, 5)]
UPSAMPLINGS = [((2, 2, 2), (4, 3, 6)), ((1, 2, 3), (3, 1, 2)), ((2, 1, 2), (2, 5, 7))]


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
    for shape in SHAPES:
        for dtype, slope in ((torch.float32, 0.01), (torch.float16, 0.0)):
            compare_norm_ops(cuda, shape, dtype, slope, part=True, tolerance=10)
    check_statistics()
    check_interpolation()
