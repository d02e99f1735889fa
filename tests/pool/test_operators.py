"""Poolings under torch.compile and fake tensors, their second derivatives, and their memory."""

import pytest
import torch
from torch.autograd import forward_ad, gradgradcheck

from scripts.bench.pool import measure_peak
from tests.contract.helpers.components import saved_bytes
from unet3d.pool.kernels import cpu
from unet3d.pool.median import MedianPool3d
from unet3d.pool.operators import choose_saved, pool3d, pool3d_backward
from unet3d.pool.replace import POOLINGS
from unet3d.pool.windows import PoolWindows

WINDOWS = [(2, 2, 0), (3, 2, 1)]
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", POOLINGS)
def test_second_derivatives_match_finite_differences(name, window):
    module = POOLINGS[name](*window)
    module.tau = 0.5
    x = torch.randperm(2 * 5 * 4 * 7).double().view(1, 2, 5, 4, 7) / 100  # distinct
    assert gradgradcheck(module, x.requires_grad_(), fast_mode=True)


@pytest.mark.parametrize(
    ("window", "expected"), [((5,), 1), (((4, 2, 2),), 1), ((5, 2, 2), 2), ((4,), 2)]
)
def test_a_large_window_saves_at_most_two_bytes_per_output(window, expected):
    x = torch.randn(2, 3, 9, 10, 8, requires_grad=True)
    y, nbytes = saved_bytes(lambda: MedianPool3d(*window)(x))
    assert nbytes == expected * y.numel()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", POOLINGS)
def test_operators_pass_opcheck(name, window, layout):
    arguments = name, PoolWindows.from_args(*window).numbers, 0.2
    x = torch.randn(1, 2, 4, 5, 6).contiguous(memory_format=layout).requires_grad_()
    torch.library.opcheck(pool3d.op, (x, *arguments), test_utils=QUICK)
    y, codes = (t.detach() for t in pool3d(x, *arguments))
    backward = y.requires_grad_(), choose_saved(name, x, codes), x.shape, *arguments
    last = layout == torch.channels_last_3d
    torch.library.opcheck(pool3d_backward.op, (*backward, last), test_utils=QUICK)


@pytest.mark.parametrize("name", ["median", "max", "avg"])
@pytest.mark.parametrize(("dtype", "peak"), [(torch.float32, 41), (torch.bfloat16, 21)])
def test_the_memory_peak_is_gradients_output_and_codes(name, dtype, peak):
    assert cpu.kernels.library(dtype)
    x = torch.randn(1, 8, 16, 16, 16).to(dtype).requires_grad_()
    module = POOLINGS[name](2)
    peak_bytes = measure_peak(module, x, torch.ones_like(module(x)))
    assert peak_bytes / (x.numel() // 8) == pytest.approx(peak - (name == "avg"), abs=0.1)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, on first use
def test_forward_mode_differentiation_is_an_error():
    x = torch.randn(1, 1, 4, 4, 4)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        MedianPool3d(2)(forward_ad.make_dual(x, torch.ones_like(x)))


def test_backward_with_several_threads_is_deterministic():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    x = torch.randn(2, 8, 17, 33, 21, requires_grad=True)
    y = MedianPool3d(3, 2, 1)(x)
    upper = torch.randn_like(y)
    first, *others = (torch.autograd.grad(y, x, upper, retain_graph=True)[0] for _ in range(4))
    torch.set_num_threads(before)
    assert all(torch.equal(first, other) for other in others)
