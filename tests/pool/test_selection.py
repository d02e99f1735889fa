"""Max pooling against that of torch, and gradients that do not depend on threads."""

import pytest
import torch
from torch import nn

from tests.pool.helpers.volumes import DTYPES, KINDS, WINDOWS, cover_pairs, make_volume
from unet3d.pool.max import MaxPool3d
from unet3d.pool.median import MedianPool3d


@pytest.mark.parametrize(
    ("kind", "window", "dtype"), cover_pairs(KINDS, WINDOWS, [*DTYPES, torch.float64])
)
def test_max_pooling_has_the_values_and_gradients_of_torch(kind, window, dtype):
    x = make_volume((2, 3, 7, 6, 9), kind, dtype).requires_grad_()
    y, expected = MaxPool3d(*WINDOWS[window])(x), nn.MaxPool3d(*WINDOWS[window])(x)
    upper = torch.randn_like(y)
    (g,) = torch.autograd.grad(y, x, upper)
    (g_expected,) = torch.autograd.grad(expected, x, upper)
    assert torch.equal(y.nan_to_num(nan=7), expected.nan_to_num(nan=7))
    # where windows overlap, torch accumulates in half precision
    tolerance = torch.finfo(dtype).eps * 8 if "stride" in window or "padding" in window else 0
    torch.testing.assert_close(g, g_expected, rtol=tolerance, atol=tolerance)


def test_backward_with_several_threads_is_deterministic():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    x = torch.randn(2, 8, 17, 33, 21, requires_grad=True)
    y = MedianPool3d(3, 2, 1)(x)
    upper = torch.randn_like(y)
    first, *others = (torch.autograd.grad(y, x, upper, retain_graph=True)[0] for _ in range(4))
    torch.set_num_threads(before)
    assert all(torch.equal(first, other) for other in others)
