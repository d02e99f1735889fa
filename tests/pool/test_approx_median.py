"""Approximate median pooling: its error bound, its limit, and half precision."""

from math import e

import pytest
import torch
from scipy.special import lambertw

from tests.pool.helpers.volumes import DTYPES, WINDOWS, make_volume
from unet3d.errors import UsageError
from unet3d.pool.approx_median import ApproxMedianPool3d
from unet3d.pool.kernels import plain
from unet3d.pool.median import MedianPool3d
from unet3d.pool.windows import PoolWindows


def compute_error_bound(elements):
    """Return the largest distance from the exact median, in units of tau, for K elements.

    The worst window has n = K // 2 elements on one side of s, all at distance t, and the others too
    far away to matter: its soft mean is off by n t / (n + exp(t / tau)). The maximum over t is
    tau W(n / e), with Lambert's W.
    """
    return lambertw(elements // 2 / e).real


@pytest.mark.parametrize("kind", ["random", "post-ReLU", "tied"])
@pytest.mark.parametrize("tau", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("window", ["2x2x2", "3x3x3 stride 2", "3x3x3 stride 2 padding 1"])
def test_the_error_stays_below_its_bound(kind, tau, window):
    x = make_volume((2, 4, 12, 12, 12), kind)
    windows = WINDOWS[window]
    error = (ApproxMedianPool3d(*windows, tau=tau)(x) - MedianPool3d(*windows)(x)).abs().max()
    assert error <= compute_error_bound(PoolWindows.from_args(*windows).elements) * tau + 1e-6


def test_the_bound_is_reached():
    t = 1.7178  # the worst distance: t = 1 + W(4 / e)
    x = torch.tensor([-1e3, -1e3, -1e3, 0, t, t, t, t], dtype=torch.float64).view(1, 1, 2, 2, 2)
    low = ApproxMedianPool3d(2, tau=1.0)(x).item()
    exact = MedianPool3d(2)(x).item()
    # the other middle value is in the cluster, and its soft mean is off towards 0
    upper = t - t * torch.tensor(-t).exp().item() / (4 + torch.tensor(-t).exp().item())
    assert low - exact == pytest.approx((compute_error_bound(8) + upper - t) / 2, abs=1e-3)


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


@pytest.mark.parametrize("window", WINDOWS)
def test_the_plain_gradient_equals_that_of_autograd(window):
    windows = PoolWindows.from_args(*WINDOWS[window])
    x = make_volume((1, 2, 6, 7, 8), "post-ReLU", torch.float64).requires_grad_()
    y = plain.approx_median(x, windows, 0.3)
    upper = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, upper)
    gradient = plain.compute_gradient(upper, x, "approx_median", windows, x.shape, 0.3)
    torch.testing.assert_close(gradient, expected)
