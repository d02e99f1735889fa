"""Poolings of standard operators, for export, have the values of the kernels."""

import pytest
import torch

from tests.pool.helpers.volumes import WINDOWS, make_volume
from unet3d.pool.approx_median import ApproxMedianPool3d
from unet3d.pool.avg import AvgPool3d
from unet3d.pool.kernels import cpu
from unet3d.pool.max import MaxPool3d
from unet3d.pool.median import MedianPool3d

LARGE_WINDOWS = {"sorted": ((3, 4, 3), 2, 0), "sorted, padded": ((5, 4, 3), (1, 2, 3), (2, 2, 1))}
KINDS = ("random", "post-ReLU", "tied", "constant", "huge", "subnormal")


@pytest.mark.parametrize("window", [*WINDOWS.values(), *LARGE_WINDOWS.values()], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_those_of_the_kernels(window, kind):
    assert cpu.kernels.library(torch.float32)
    for dtype in (torch.float32, torch.float64):  # kernels, and plain PyTorch
        x = make_volume((2, 3, 9, 8, 10), kind, dtype)
        for pool in (MedianPool3d(*window), MaxPool3d(*window)):
            assert torch.equal(pool.pool_by_standard_operators(x), pool(x))
        for pool in (AvgPool3d(*window), ApproxMedianPool3d(*window, tau=0.3)):
            y = pool.pool_by_standard_operators(x)
            torch.testing.assert_close(y, pool(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [(3, 1, 1), (4, 4, 0), (2, 2, 0)], ids=str)
@pytest.mark.parametrize("pool", [MedianPool3d, ApproxMedianPool3d])
def test_a_window_with_nan_gives_nan(pool, window):
    x = torch.zeros(1, 1, 8, 8, 8)
    x[0, 0, 1, 2, 3] = torch.nan
    pool = pool(*window)
    found = pool.pool_by_standard_operators(x).isnan()
    assert found.any()
    assert torch.equal(found, pool(x).isnan())
