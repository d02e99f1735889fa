"""The compiled kernels of fused blocks against plain PyTorch, which defines them."""

from fractions import Fraction

import pytest
import torch

from tests.model.helpers.interpolation import interpolate_in_parts
from unet3d.model.blocks import Interpolate
from unet3d.model.fused.kernels import cpu, dispatch
from unet3d.model.fused.ops import norm_ops
from unet3d.model.fused.upsampling import _Interpolation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHANNELS_LAST = {"memory_format": torch.channels_last_3d}
SHAPES = [(2, 5, 4, 3, 7), (1, 16, 3, 5, 4), (2, 1, 4, 4, 4), (1, 33, 2, 2, 9)]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    assert cpu.kernels.library(request.param)
    return request.param


def volume(shape, dtype, *, part=False):
    """Return a channels-last map, or some rows and channels of a larger one."""
    if not part:
        return torch.randn(shape).to(dtype).contiguous(**CHANNELS_LAST)
    b, c, d, h, w = shape
    full = torch.randn(b, c + 3, d + 2, h, w).to(dtype).contiguous(**CHANNELS_LAST)
    return full[:, 1 : c + 1, 1 : d + 1]


def random_numbers(shape, count):
    return [torch.randn(shape[:2]) for _ in range(count)]


def run_plain(monkeypatch, function, *arguments):
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "select_kernels", lambda *_: None)
        return function(*arguments)


def assert_near(result, expected, dtype):
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result, expected, rtol=2 * eps, atol=8 * eps)


@pytest.mark.parametrize("part", [False, True], ids=["full", "part"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_moments_equal_plain_ones(shape, part, dtype, monkeypatch):
    y = volume(shape, dtype, part=part) * 3 + 50  # far from zero, where sums of squares cancel
    result, expected = norm_ops.make_sums(y), norm_ops.make_sums(y)
    for count in (0, y[0, 0].numel()):
        norm_ops.add_moments(y - count % 2, count, result)
        run_plain(monkeypatch, norm_ops.add_moments, y - count % 2, count, expected)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)


def test_moments_of_tiles_are_those_of_the_whole_map():
    y = volume((2, 16, 9, 8, 7), torch.float32) * 3 + 50
    total = norm_ops.make_sums(y)
    for start, stop in ((0, 2), (2, 3), (3, 9)):
        norm_ops.add_moments(y[:, :, start:stop], start * 56, total)
    variance, mean = torch.var_mean(y, dim=(2, 3, 4), correction=0)
    torch.testing.assert_close(total[0], mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(total[1] / (9 * 56), variance, rtol=1e-5, atol=0)


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("slope", [0.0, 0.01])
@pytest.mark.parametrize("part", [False, True], ids=["full", "part"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_normalization_equals_the_plain_one(shape, part, slope, add, dtype, monkeypatch):
    y, (scale, shift) = volume(shape, dtype, part=part), random_numbers(shape, 2)
    result = volume(shape, dtype, part=part)
    expected = result.clone()
    norm_ops.normalize(y, scale, shift, slope, add, result)
    run_plain(monkeypatch, norm_ops.normalize, y, scale, shift, slope, add, expected)
    assert_near(result, expected, dtype)


@pytest.mark.parametrize("slope", [0.0, 0.01])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_compiled_activation_gradient_equals_the_plain_one(shape, slope, dtype, monkeypatch):
    a, result = (volume(shape, dtype, part=True) for _ in range(2))
    expected = result.clone()
    norm_ops.activation_gradient(a, slope, result)
    run_plain(monkeypatch, norm_ops.activation_gradient, a, slope, expected)
    assert_near(result, expected, dtype)


@pytest.mark.parametrize("slope", [0.0, 0.01])
@pytest.mark.parametrize("part", [False, True], ids=["full", "part"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_gradient_sums_equal_plain_ones(shape, part, slope, dtype, monkeypatch):
    g, y = (volume(shape, dtype, part=part) for _ in range(2))
    arguments = (g, y, *random_numbers(shape, 4), slope)
    result, expected = norm_ops.make_sums(y), norm_ops.make_sums(y)
    for first in (True, False):
        norm_ops.add_gradient_sums(*arguments, first, result)
        run_plain(monkeypatch, norm_ops.add_gradient_sums, *arguments, first, expected)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", ["new", "over g", "over y"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_compiled_gradient_equals_the_plain_one(shape, target, dtype, monkeypatch):
    g, y = (volume(shape, dtype, part=True) for _ in range(2))
    numbers, results = random_numbers(shape, 4), []
    for run in (run_plain, lambda _, function, *arguments: function(*arguments)):
        u, v = g.clone(), y.clone()
        out = {"new": torch.empty_like(g), "over g": u, "over y": v}[target]
        run(monkeypatch, norm_ops.gradient, u, v, *numbers, 0.01, out)
        results.append(out)
    assert_near(results[1], results[0], dtype)


@pytest.mark.parametrize("linear", [True, False], ids=["trilinear", "nearest"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("factors", [(2, 2, 2), (1, 2, 3)], ids=str)
def test_interpolation_in_parts_equals_that_of_torch(factors, compiled, linear, monkeypatch):
    assert cpu.kernels.library(torch.float32)
    if not compiled:
        monkeypatch.setattr(dispatch, "select_kernels", lambda *_: None)
    low = volume((2, 5, 4, 3, 6), torch.float32)
    parts = interpolate_in_parts(low, factors, linear=linear)
    torch.testing.assert_close(parts.result, parts.expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.gradient, parts.expected_gradient, rtol=1e-5, atol=1e-5)


def test_nan_propagates():
    y = volume((1, 16, 4, 4, 4), torch.float32)
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
