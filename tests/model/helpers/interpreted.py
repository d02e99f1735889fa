"""Compare the Triton kernels of fused blocks, interpreted, with plain PyTorch; exit 1 if unequal.

A separate program, run with TRITON_INTERPRET=1: Triton reads that when kernels are defined.
"""

import sys
from types import ModuleType

import torch
from torch import Tensor

from tests.model.helpers.interpolation import interpolate_in_parts
from unet3d.model.fused.kernels import cuda, dispatch
from unet3d.model.fused.ops import norm_ops

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
    norm_ops.normalize(y, scale, shift, 0.01, out)
    norm_ops.gradient(in_place, y, scale, shift, mean, inverse, 0.0, in_place)
    sums = norm_ops.gradient_sums(g, y, scale, shift, mean + 20, inverse, 0.01)
    return [norm_ops.moments(y), out, in_place, sums]


def check_norms() -> int:
    failures = 0
    for shape in SHAPES:
        for dtype in DTYPES:
            results = run_norm_ops(shape, dtype, cuda)
            expected = run_norm_ops(shape, dtype, None)
            for n, (a, b) in enumerate(zip(results, expected, strict=True)):
                tolerance = 4 * torch.finfo(a.dtype).eps if n in (1, 2) else 1e-4
                if not torch.allclose(a, b, rtol=max(tolerance, 1e-5), atol=20 * tolerance):
                    failures += 1
                    print(shape, dtype, n, (a - b).abs().max(), file=sys.stderr)
    return failures


def check_interpolation() -> int:
    failures = 0
    dispatch.select_kernels = lambda *_: cuda  # ty: ignore[invalid-assignment]
    for linear in (True, False):
        for factors, size in UPSAMPLINGS:
            low = torch.randn(2, 5, *size).contiguous(memory_format=torch.channels_last_3d)
            parts = interpolate_in_parts(low, factors, linear=linear)
            results = (parts.result, parts.expected), (parts.gradient, parts.expected_gradient)
            for a, b in results:
                if not torch.allclose(a, b, rtol=1e-4, atol=1e-4):
                    failures += 1
                    print(linear, factors, size, (a - b).abs().max(), file=sys.stderr)
    return failures


if __name__ == "__main__":
    sys.exit(1 if check_norms() + check_interpolation() else 0)
