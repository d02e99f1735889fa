"""Poolings under torch.compile, checkpointing, export, autocast, and higher derivatives."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradgradcheck

from tests.contract.helpers.components import saved_bytes
from unet3d.pool import approx_median, avg, selection
from unet3d.pool import max as maximum
from unet3d.pool import median as exact
from unet3d.pool.approx_median import ApproxMedianPool3d
from unet3d.pool.avg import AvgPool3d
from unet3d.pool.kernels import cpu
from unet3d.pool.max import MaxPool3d
from unet3d.pool.median import MedianPool3d
from unet3d.pool.windows import PoolWindows

POOLS = {
    "median": MedianPool3d,
    "max": MaxPool3d,
    "avg": AvgPool3d,
    "approx_median": ApproxMedianPool3d,
}
WINDOWS = [(2, 2, 0), (3, 2, 1)]


@pytest.fixture(params=POOLS)
def pool(request):
    return POOLS[request.param]


def run_with_gradient(function, x):
    x = x.detach().requires_grad_()
    y = function(x)
    upper = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    y.backward(upper)
    return y.detach(), x.grad


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [(4, 4, 6), (5, 4, 7)])
def test_second_derivatives_match_finite_differences(pool, window, size):
    module = pool(*window, tau=0.5) if pool is ApproxMedianPool3d else pool(*window)
    distinct = torch.randperm(2 * size[0] * size[1] * size[2]).double() / 100
    x = distinct.view(1, 2, *size).requires_grad_()
    assert gradgradcheck(module, x, fast_mode=True)


QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_a_large_even_window_saves_two_bytes_per_output():
    x = torch.randn(2, 3, 8, 8, 8, requires_grad=True)
    _, nbytes = saved_bytes(lambda: MedianPool3d(4, 4)(x))
    assert nbytes == 2 * 2 * 3 * 2**3


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_operator_passes_opcheck(window, layout):
    axes, last = PoolWindows.from_args(*window).axes, layout == torch.channels_last_3d
    x = torch.randn(1, 2, 4, 5, 6).contiguous(memory_format=layout).requires_grad_()

    def check(op, arguments):
        torch.library.opcheck(op.op, arguments, test_utils=QUICK)

    for name, op in (("median", exact.median_pool3d), ("max", maximum.max_pool3d)):
        check(op, (x, *axes))
        y, codes = (t.detach() for t in op(x, *axes))
        check(selection.pool_scatter, (y.requires_grad_(), codes, name, x.shape, *axes, last))
        check(selection.pool_gather, (x, codes, name, *axes))
    check(avg.avg_pool3d, (x, *axes))
    check(avg.avg_pool3d_backward, (y, x.shape, *axes, last))
    check(approx_median.approx_median_pool3d, (x, *axes, 0.2))
    check(approx_median.approx_median_pool3d_backward, (y, x, *axes, 0.2))


def test_torch_compile_captures_poolings_of_any_size_without_graph_breaks():
    layers = MedianPool3d(2), MaxPool3d((1, 2, 2)), AvgPool3d(2), ApproxMedianPool3d(1)
    modules = nn.Sequential(*layers)
    compiled = torch.compile(modules, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in ((8, 16, 8), (9, 16, 10)):
        x = torch.randn(1, 2, *size)
        y, g = run_with_gradient(modules, x)
        y_compiled, g_compiled = run_with_gradient(compiled, x)
        assert torch.equal(y, y_compiled)
        assert torch.equal(g, g_compiled)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(pool, layout):
    x = torch.randn(2, 3, 9, 7, 8).contiguous(memory_format=layout)
    y, g = run_with_gradient(pool(3, 2, 1), x)
    with FakeTensorMode() as mode:
        y_fake, g_fake = run_with_gradient(pool(3, 2, 1), mode.from_tensor(x))
    assert (y_fake.shape, y_fake.stride()) == (y.shape, y.stride())
    assert (g_fake.shape, g_fake.stride()) == (g.shape, g.stride())


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, on first use
def test_forward_mode_differentiation_is_an_error(pool):
    x = torch.randn(1, 1, 4, 4, 4)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        pool(2)(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(pool(2), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("name", ["median", "max", "avg"])
@pytest.mark.parametrize(("dtype", "peak"), [(torch.float32, 41), (torch.bfloat16, 21)])
def test_the_memory_peak_is_gradients_output_and_codes(name, dtype, peak):
    assert cpu.kernels.library(dtype)
    x = torch.randn(1, 8, 16, 16, 16).to(dtype).requires_grad_()
    module = POOLS[name](2)
    outputs = x.numel() // 8
    with torch.profiler.profile(profile_memory=True) as profile:
        y = module(x)
        y.backward(torch.ones_like(y))
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    current = top = 0
    for _, change in sorted(changes):
        current += change
        top = max(top, current)
    assert top / outputs == pytest.approx(peak - (name == "avg"), abs=0.1)
