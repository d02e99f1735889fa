"""The kernels of fused blocks against plain PyTorch, which defines them."""

import pytest
import torch

from tests.model.helpers.operators import compare_interpolation, compare_norm_ops, make_map
from unet3d.model.fused import operators
from unet3d.model.fused.kernels import cpu

SHAPES = [(2, 5, 4, 3, 7), (1, 16, 3, 5, 4), (2, 1, 4, 4, 4), (1, 33, 2, 2, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("part", [False, True], ids=["full", "part"])
@pytest.mark.parametrize("slope", [0.0, 0.01])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_kernels_equal_plain_pytorch(shape, slope, part, dtype):
    assert cpu.kernels.library(dtype)
    compare_norm_ops(cpu, shape, dtype, slope, part=part)


@pytest.mark.parametrize("linear", [True, False], ids=["trilinear", "nearest"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("factors", [(2, 2, 2), (1, 2, 3)], ids=str)
def test_interpolation_in_parts_equals_that_of_torch(factors, compiled, linear, monkeypatch):
    assert cpu.kernels.library(torch.float32)
    if not compiled:
        monkeypatch.setattr(operators, "select_kernels", lambda *_: None)
    low = make_map((2, 5, 4, 3, 6), torch.float32, part=False)
    compare_interpolation(low, factors, linear=linear)
