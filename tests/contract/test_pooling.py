"""Poolings equal naive references in value and gradient, and keep one byte per output."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck

import unet3d as package
from tests.contract.helpers.components import saved_bytes

POOLS = {
    "max": package.MaxPool3d,
    "avg": package.AvgPool3d,
    "median": package.MedianPool3d,
    "approx_median": package.ApproxMedianPool3d,
}
WINDOWS = {
    "2": (2,),
    "1x2x2": ((1, 2, 2),),
    "3": (3,),
    "3 stride 2": (3, 2),
    "3 stride 2 padding 1": (3, 2, 1),
    "2x3x2 stride 2x1x2 padding 1x1x0": ((2, 3, 2), (2, 1, 2), (1, 1, 0)),
}


def unfold(x, kernel_size, stride=None, padding=0):
    """Return the elements of each window as the last axis, in order, with NaN for padding."""
    sizes, steps, pads = (
        (value,) * 3 if isinstance(value, int) else value
        for value in (kernel_size, kernel_size if stride is None else stride, padding)
    )
    x = F.pad(x, [side for n in reversed(pads) for side in (n, n)], value=torch.nan)
    for axis, (size, step) in enumerate(zip(sizes, steps, strict=True), start=2):
        x = x.unfold(axis, size, step)
    return x.flatten(5)


def take_middle(windows):
    """Return the two middle elements of each window, which are one for an odd number of them."""
    inside = (~windows.isnan()).sum(-1, keepdim=True)
    elements = windows.nan_to_num(torch.inf).sort(dim=-1, stable=True).values  # padding comes last
    return elements.gather(-1, torch.cat([(inside - 1) // 2, inside // 2], -1))


def pool_max(windows):
    order = windows.nan_to_num(-torch.inf).argmax(-1, keepdim=True)
    return windows.gather(-1, order)[..., 0]


def pool_median(windows):
    return take_middle(windows).mean(-1)


def pool_avg(windows):
    return windows.nan_to_num(0).mean(-1)


def pool_approx_median(windows, tau=0.1):
    centers = take_middle(windows)[..., None, :]
    distances = (windows[..., None] - centers).abs().nan_to_num(torch.inf)
    weights = torch.softmax(-distances / tau, -2)
    return (weights * windows.nan_to_num(0)[..., None]).sum(-2).mean(-1)


NAIVE = {
    "max": pool_max,
    "avg": pool_avg,
    "median": pool_median,
    "approx_median": pool_approx_median,
}


def run(function, x):
    """Return the output, and the gradient of the input for a given gradient of the output."""
    x = x.detach().requires_grad_()
    y = function(x)
    upper = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    (gradient,) = torch.autograd.grad(y, x, upper)
    return y.detach(), gradient


def make_volume(size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    count = 2 * 5 * size[0] * size[1] * size[2]
    return (torch.randperm(count, generator=generator).double() / 100).view(2, 5, *size).to(dtype)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", POOLS)
def test_values_and_gradients_equal_a_naive_reference(name, window):
    for dtype in (torch.float32, torch.float64):  # kernels, and plain torch
        x = make_volume((9, 7, 10), dtype)
        y, gradient = run(POOLS[name](*WINDOWS[window]), x)
        expected = run(lambda x: NAIVE[name](unfold(x, *WINDOWS[window])), x.double())
        torch.testing.assert_close(y, expected[0].to(dtype))
        torch.testing.assert_close(gradient, expected[1].to(dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("window", ["2", "3 stride 2 padding 1"])
def test_channels_last_keeps_its_layout_and_values(name, window):
    x, pool = make_volume((9, 7, 10)), POOLS[name](*WINDOWS[window])
    y, gradient = run(pool, x)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    y_last, gradient_last = run(pool, last)
    assert y_last.is_contiguous(memory_format=torch.channels_last_3d)
    assert gradient_last.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(y_last, y)
    torch.testing.assert_close(gradient_last, gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", POOLS)
def test_half_precision_rounds_the_values_of_full_precision(name, dtype):
    x = (make_volume((6, 7, 8)) / 20).to(dtype)
    y, gradient = run(POOLS[name](2), x)
    expected, expected_gradient = run(lambda x: NAIVE[name](unfold(x, 2)), x.double())
    assert y.dtype == gradient.dtype == dtype
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(y.double(), expected, **tolerance)
    torch.testing.assert_close(gradient.double(), expected_gradient, **tolerance)


@pytest.mark.parametrize("window", ["2", "3 stride 2 padding 1"])
@pytest.mark.parametrize("name", POOLS)
def test_derivatives_match_finite_differences(name, window):
    x = (make_volume((4, 5, 6), torch.float64)[:1, :1]).requires_grad_()
    assert gradcheck(POOLS[name](*WINDOWS[window]), x, fast_mode=True)


def test_of_equal_elements_the_first_ones_receive_the_gradient():
    x = torch.zeros(1, 1, 2, 2, 2)
    assert run(package.MaxPool3d(2), x)[1].flatten().tolist() == [-1, 0, 0, 0, 0, 0, 0, 0]
    median = run(package.MedianPool3d(2), x)[1].flatten().tolist()
    assert median == [0, 0, 0, -0.5, -0.5, 0, 0, 0]
    tied = torch.tensor([5.0, 1, 1, 3, 3, 3, 0, 9]).view(1, 1, 2, 2, 2)
    y, gradient = run(package.MedianPool3d(2), tied)
    assert y.item() == 3
    assert gradient.flatten().tolist() == [0, 0, 0, -0.5, -0.5, 0, 0, 0]


def test_nan_stays_in_its_window_and_infinity_is_a_value():
    x = make_volume((4, 4, 4))[:1, :2].clone()
    x[0, 1, 3, 0, 2] = torch.nan
    for name, pool in POOLS.items():
        assert pool(2)(x).isnan().nonzero().tolist() == [[0, 1, 1, 0, 1]], name
    x = torch.tensor([-torch.inf, 1, 2, 3, 4, torch.inf, torch.inf, torch.inf]).view(1, 1, 2, 2, 2)
    assert package.MedianPool3d(2)(x).item() == 3.5


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["max", "median"])
def test_backward_keeps_one_byte_per_output(name, dtype, layout):
    x = make_volume((8, 8, 8), dtype).contiguous(memory_format=layout).requires_grad_()
    for window in ("2", "1x2x2", "3", "3 stride 2 padding 1"):
        pool = POOLS[name](*WINDOWS[window])
        y, nbytes = saved_bytes(lambda pool=pool: pool(x))
        assert nbytes == y.numel()


def test_average_pooling_keeps_nothing_and_the_approximate_median_its_input():
    x = make_volume((8, 8, 8)).requires_grad_()
    assert saved_bytes(lambda: package.AvgPool3d(2)(x))[1] == 0
    assert saved_bytes(lambda: package.ApproxMedianPool3d(2)(x))[1] == x.nbytes


def test_the_approximate_median_becomes_the_exact_one():
    x = make_volume((6, 6, 6), torch.float64)
    for tau in (1.0, 0.1, 0.001):
        error = package.ApproxMedianPool3d(2, tau=tau)(x) - package.MedianPool3d(2)(x)
        assert error.abs().max() <= 0.72 * tau


@pytest.mark.parametrize("name", ["max", "avg", "median"])
def test_poolings_compile_without_graph_breaks(name):
    pool = nn.Sequential(nn.ReLU(), POOLS[name](2), nn.Tanh())
    compiled = torch.compile(pool, fullgraph=True, backend="aot_eager")
    x = make_volume((5, 8, 6))
    for ours, expected in zip(run(compiled, x), run(pool, x), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", POOLS)
def test_poolings_export_and_are_copied(name):
    x, pool = make_volume((4, 6, 4)), POOLS[name](2)
    program = torch.export.export(nn.Sequential(pool), (x,))
    assert torch.equal(program.module()(x), pool(x))
    assert torch.equal(copy.deepcopy(pool)(x), pool(x))
    assert not pool.state_dict()


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1),
        nn.Sequential(nn.MaxPool3d(3, 2, 1), nn.AvgPool3d((2, 2, 1), padding=(1, 1, 0))),
        nn.ReLU(),
        nn.AvgPool3d(2),
    )


def test_replaced_poolings_of_the_same_kind_change_nothing_but_memory():
    network = make_network()
    replaced = copy.deepcopy(network)
    assert package.replace_pooling(replaced) == 3
    kinds = [type(module) for module in (*replaced[1], replaced[3])]
    assert kinds == [package.MaxPool3d, package.AvgPool3d, package.AvgPool3d]
    x = torch.randn(2, 1, 16, 16, 16)
    for ours, expected in zip(run(replaced, x), run(network, x), strict=True):
        torch.testing.assert_close(ours, expected)
    ours, theirs = (saved_bytes(lambda n=n: n(x))[1] for n in (replaced, network))
    assert ours < theirs


def test_any_pooling_becomes_another_one():
    network = make_network()
    assert package.replace_pooling(network, "median") == 3
    assert type(network[1][0]) is type(network[3]) is package.MedianPool3d
    assert package.replace_pooling(network, package.ApproxMedianPool3d) == 3
    assert type(network[3]) is package.ApproxMedianPool3d
    unet = package.UNet3D(in_channels=1, num_classes=2, depth=3, width=4, pool="avg")
    assert package.replace_pooling(unet, "median") == 2
    expected = package.UNet3D(in_channels=1, num_classes=2, depth=3, width=4, pool="median")
    expected.load_state_dict(unet.state_dict())
    x = torch.randn(2, 1, 8, 16, 16)
    assert torch.equal(unet(x), expected(x))


def test_a_pooling_that_works_in_another_way_is_named():
    network = nn.Sequential(nn.Sequential(nn.MaxPool3d(2, ceil_mode=True)))
    with pytest.raises(ValueError, match=r"0\.0: .*ceil_mode"):
        package.replace_pooling(network)
    with pytest.warns(UserWarning, match="no 3D pooling"):
        assert package.replace_pooling(nn.Sequential(nn.Conv3d(1, 1, 3))) == 0
