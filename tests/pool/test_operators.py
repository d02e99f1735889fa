"""Poolings under torch.compile, checkpointing, export, autocast, and higher derivatives."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from tests.pool.helpers.volumes import HALVES
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


def collect_saved_tensors(function):
    """Return what autograd saves for backward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function()
    return saved


@pytest.mark.parametrize("name", ["median", "max"])
@pytest.mark.parametrize(
    ("window", "saved_bytes"),
    [((2,), 1), (((1, 2, 2),), 1), ((3, 2, 1), 1), ((3, 3), 1), (((4, 2, 2),), 1), ((4, 4), 2)],
)
def test_backward_saves_a_byte_per_output_and_not_the_input(name, window, saved_bytes):
    module = POOLS[name](*window)
    x = torch.randn(2, 3, 8, 8, 8, requires_grad=True)
    y = module(x)
    saved = collect_saved_tensors(lambda: module(x))
    expected = 1 if name == "max" else saved_bytes
    assert sum(t.untyped_storage().nbytes() for t in saved) == expected * y.numel()


def test_average_pooling_saves_nothing():
    x = torch.randn(2, 3, 8, 8, 8, requires_grad=True)
    assert collect_saved_tensors(lambda: AvgPool3d(2)(x)) == []


def test_approximate_median_pooling_saves_only_its_input():
    x = torch.randn(2, 3, 8, 8, 8, requires_grad=True)
    (saved,) = collect_saved_tensors(lambda: ApproxMedianPool3d(2)(x))
    assert saved.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [(4, 4, 6), (5, 4, 7)])
def test_first_and_second_derivatives_match_finite_differences(pool, window, size):
    module = pool(*window, tau=0.5) if pool is ApproxMedianPool3d else pool(*window)
    distinct = torch.randperm(2 * size[0] * size[1] * size[2]).double() / 100
    x = distinct.view(1, 2, *size).requires_grad_()
    assert gradcheck(module, x, fast_mode=True)
    assert gradgradcheck(module, x, fast_mode=True)


TRACING = "test_aot_dispatch_dynamic"  # takes seconds for each operator
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


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


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch 2.14's own
def test_opcheck_traces_every_pooling_with_symbolic_sizes():
    axes, x = PoolWindows.from_args(2, None, 0).axes, torch.randn(1, 2, 4, 5, 6, requires_grad=True)
    for op, rest in (
        (exact.median_pool3d, ()),
        (maximum.max_pool3d, ()),
        (avg.avg_pool3d, ()),
        (approx_median.approx_median_pool3d, (0.2,)),
    ):
        torch.library.opcheck(op.op, (x, *axes, *rest), test_utils=TRACING)


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_captures_poolings_without_graph_breaks(dynamic):
    modules = nn.Sequential(MedianPool3d(2), MaxPool3d((1, 2, 2)), AvgPool3d(2))
    compiled = torch.compile(modules, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in ((8, 16, 8), (9, 16, 10)):
        x = torch.randn(1, 2, *size)
        y, g = run_with_gradient(modules, x)
        y_compiled, g_compiled = run_with_gradient(compiled, x)
        assert torch.equal(y, y_compiled)
        assert torch.equal(g, g_compiled)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, on first use
def test_inductor_compiles_a_layer_around_a_pooling():
    module = nn.Sequential(nn.ReLU(), MedianPool3d(2), nn.ReLU())
    x = torch.randn(1, 2, 4, 6, 8)
    y, g = run_with_gradient(module, x)
    y_compiled, g_compiled = run_with_gradient(torch.compile(module, fullgraph=True), x)
    assert torch.equal(y, y_compiled)
    assert torch.equal(g, g_compiled)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(pool, use_reentrant):
    block = nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU(), pool(2))
    x = torch.randn(1, 1, 7, 8, 9)
    y, g = run_with_gradient(block, x)
    y_checkpointed, g_checkpointed = run_with_gradient(
        lambda x: checkpoint(block, x, use_reentrant=use_reentrant), x
    )
    assert torch.equal(y, y_checkpointed)
    assert torch.equal(g, g_checkpointed)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(pool, layout):
    x = torch.randn(2, 3, 9, 7, 8).contiguous(memory_format=layout)
    y, g = run_with_gradient(pool(3, 2, 1), x)
    with FakeTensorMode() as mode:
        y_fake, g_fake = run_with_gradient(pool(3, 2, 1), mode.from_tensor(x))
    assert (y_fake.shape, y_fake.stride()) == (y.shape, y.stride())
    assert (g_fake.shape, g_fake.stride()) == (g.shape, g.stride())


def test_export_keeps_the_operator():
    program = torch.export.export(MedianPool3d(2), (torch.randn(1, 2, 4, 4, 4),))
    assert "unet3d.median_pool3d" in program.graph_module.code
    x = torch.randn(1, 2, 4, 4, 4)
    assert torch.equal(program.module()(x), MedianPool3d(2)(x))


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, on first use
def test_forward_mode_differentiation_is_an_error(pool):
    x = torch.randn(1, 1, 4, 4, 4)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        pool(2)(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(pool(2), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_autocast_does_not_change_the_dtype(pool, dtype):
    x = torch.randn(1, 1, 4, 4, 4, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pool(2)(x).dtype == dtype


def test_without_requires_grad_there_is_no_graph(pool):
    x = torch.randn(1, 1, 4, 4, 4)
    assert not pool(2)(x).requires_grad
    with torch.no_grad():
        assert not pool(2)(x.requires_grad_()).requires_grad


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
