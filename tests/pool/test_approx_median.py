"""Approximate median pooling of extreme values and in half precision."""

import pytest
import torch

from tests.pool.helpers.volumes import DTYPES, make_volume
from unet3d.errors import UsageError
from unet3d.pool.approx_median import ApproxMedianPool3d


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "post-ReLU", "constant", "huge", "subnormal"])
@pytest.mark.parametrize("tau", [1e-4, 0.1, 100.0])
def test_finite_input_gives_finite_output_and_gradients(dtype, kind, tau):
    x = (make_volume((1, 2, 4, 6, 8), kind, dtype) / 4).requires_grad_()
    y = ApproxMedianPool3d(2, tau=tau)(x)
    (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.isfinite().all()
    assert g.isfinite().all()


def test_infinity_far_from_the_middle_has_no_weight():
    x = torch.tensor([-torch.inf, 1, 1, 2, 2, 2, 3, torch.inf]).view(1, 1, 2, 2, 2)
    assert 1.9 < ApproxMedianPool3d(2)(x).item() < 2.1


@pytest.mark.parametrize("tau", [0.0, -1.0, float("nan")])
def test_tau_must_be_greater_than_zero(tau):
    with pytest.raises(UsageError, match=r"^tau must be greater than 0, got"):
        ApproxMedianPool3d(2, tau=tau)
