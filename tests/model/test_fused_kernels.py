"""The compiled kernels of fused blocks against plain PyTorch, which defines them."""

from fractions import Fraction

import pytest
import torch

from tests.model.helpers.operators import compare_norm_ops, interpolate_in_parts, make_map
from unet3d.model.blocks import Interpolate
from unet3d.model.fused.kernels import cpu, dispatch
from unet3d.model.fused.ops import norm_ops
from unet3d.model.fused.upsampling import _Interpolation

SHAPES = [(2, 5, 4, 3, 7), (1, 16, 3, 5, 4), (2, 1, 4, 4, 4), (1, 33, 2, 2, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("part", [False, True], ids=["full", "part"])
@pytest.mark.parametrize("slope", [0.0, 0.01])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_kernels_equal_plain_pytorch(shape, slope, part, dtype):
    assert cpu.kernels.library(dtype)
    compare_norm_ops(cpu, shape, dtype, slope, part=part)


def test_moments_of_tiles_are_those_of_the_whole_map():
    y = make_map((2, 16, 9, 8, 7), torch.float32, part=False) * 3 + 50
    total = norm_ops.make_sums(y)
    for start, stop in ((0, 2), (2, 3), (3, 9)):
        norm_ops.add_moments(y[:, :, start:stop], start * 56, total)
    variance, mean = torch.var_mean(y, dim=(2, 3, 4), correction=0)
    torch.testing.assert_close(total[0], mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(total[1] / (9 * 56), variance, rtol=1e-5, atol=0)


@pytest.mark.parametrize("linear", [True, False], ids=["trilinear", "nearest"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("factors", [(2, 2, 2), (1, 2, 3)], ids=str)
def test_interpolation_in_parts_equals_that_of_torch(factors, compiled, linear, monkeypatch):
    assert cpu.kernels.library(torch.float32)
    if not compiled:
        monkeypatch.setattr(dispatch, "select_kernels", lambda *_: None)
    low = make_map((2, 5, 4, 3, 6), torch.float32, part=False)
    parts = interpolate_in_parts(low, factors, linear=linear)
    torch.testing.assert_close(parts.result, parts.expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.gradient, parts.expected_gradient, rtol=1e-5, atol=1e-5)


def test_nan_propagates():
    y = make_map((1, 16, 4, 4, 4), torch.float32, part=False)
    y[0, 3, 1, 1, 1] = torch.nan
    out = torch.empty_like(y)
    norm_ops.normalize(y, torch.ones(1, 16), torch.zeros(1, 16), 0.0, False, out)
    assert out[0, 3, 1, 1, 1].isnan()
    total = norm_ops.make_sums(y)
    norm_ops.add_moments(y, 0, total)
    assert total[0, 0, 3].isnan()


def test_a_tile_has_the_coarser_rows_that_its_rows_are_computed_from():
    method = _Interpolation(Interpolate((2, 2, 2), "trilinear"))
    for low_size in range(1, 40):
        for size in (2 * low_size, 3 * low_size, 7 * low_size):
            for first in range(0, size, 5):
                last = min(first + 5, size)
                a, b = method.source_rows(first, last, size, low_size)
                exact = [Fraction(n * (low_size - 1), size - 1) for n in (first, last - 1)]
                assert a == exact[0].__floor__()
                assert b == min(exact[1].__floor__() + 2, low_size)
