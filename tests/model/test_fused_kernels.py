"""The kernels of fused blocks against plain PyTorch, which defines them."""

from fractions import Fraction

import pytest
import torch

from tests.model.helpers.operators import compare_interpolation, compare_norm_ops, make_map
from unet3d.model.fused import operators
from unet3d.model.fused.decoder import find_source_rows
from unet3d.model.fused.kernels import cpu, cuda

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
    total = operators.make_sums(y)
    for start, stop in ((0, 2), (2, 3), (3, 9)):
        operators.add_moments(y[:, :, start:stop], start * 56, total)
    variance, mean = torch.var_mean(y, dim=(2, 3, 4), correction=0)
    torch.testing.assert_close(total[0], mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(total[1] / (9 * 56), variance, rtol=1e-5, atol=0)


@pytest.mark.parametrize("linear", [True, False], ids=["trilinear", "nearest"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("factors", [(2, 2, 2), (1, 2, 3)], ids=str)
def test_interpolation_in_parts_equals_that_of_torch(factors, compiled, linear, monkeypatch):
    assert cpu.kernels.library(torch.float32)
    if not compiled:
        monkeypatch.setattr(operators, "select_kernels", lambda *_: None)
    low = make_map((2, 5, 4, 3, 6), torch.float32, part=False)
    compare_interpolation(low, factors, linear=linear)


def test_nan_propagates():
    y = make_map((1, 16, 4, 4, 4), torch.float32, part=False)
    y[0, 3, 1, 1, 1] = torch.nan
    out = torch.empty_like(y)
    operators.normalize(y, torch.ones(1, 16), torch.zeros(1, 16), 0.0, False, out)
    assert out[0, 3, 1, 1, 1].isnan()
    total = operators.make_sums(y)
    operators.add_moments(y, 0, total)
    assert total[0, 0, 3].isnan()


def test_a_tile_has_the_coarser_rows_that_its_rows_are_computed_from():
    for low_size in range(1, 40):
        for size in (2 * low_size, 3 * low_size, 7 * low_size):
            for first in range(0, size, 5):
                last = min(first + 5, size)
                a, b = find_source_rows(first, last, size, low_size, linear=True)
                exact = [Fraction(n * (low_size - 1), size - 1) for n in (first, last - 1)]
                assert a == exact[0].__floor__()
                assert b == min(exact[1].__floor__() + 2, low_size)


@pytest.mark.slow
def test_triton_kernels_without_a_gpu_equal_plain_pytorch(run_interpreted):
    run_interpreted("tests.model.helpers.operators")


def test_the_estimate_knows_what_the_upsampling_kernel_allocates(monkeypatch):
    monkeypatch.setattr(cuda, "launch", lambda *arguments, **constants: None)
    sizes, empty = [], torch.empty

    def count(*arguments, **options):
        result = empty(*arguments, **options)
        sizes.append(result.numel() * result.element_size())
        return result

    monkeypatch.setattr(torch, "empty", count)
    g, low = torch.zeros(2, 3, 4, 6, 8), torch.zeros(2, 3, 2, 3, 4)
    axes = [0, 4, 0, 2, 0, 6, 0, 3, 0, 8, 0, 4]
    cuda.interpolate_gradient(g, axes, True, low)
    assert sizes == operators.interpolate_gradient.list_temporaries(g, axes, True, low)
