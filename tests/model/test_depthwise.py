"""Fast depthwise convolutions against torch's: values, gradients, layouts, what falls back."""

from copy import deepcopy

import pytest
import torch
from monai.data import MetaTensor
from torch import nn

from unet3d.checkpointing.recompute import find_blocks
from unet3d.model import depthwise
from unet3d.model.depthwise import compute_weight_gradient, use_fast_depthwise
from unet3d.step.build import build_network

CONVOLUTIONS = {
    "3": (nn.Conv3d, 32, 3, 1, 1),
    "5, odd channels": (nn.Conv3d, 23, 5, 1, 2),
    "7, few channels": (nn.Conv3d, 3, 7, 1, 3),
    "stride 2": (nn.Conv3d, 16, 3, 2, 1),
    "a size, stride and padding per axis": (nn.Conv3d, 6, (1, 3, 4), (1, 2, 3), (0, 1, 2)),
    "transposed": (nn.ConvTranspose3d, 18, 3, 2, 1),
    "transposed, 5": (nn.ConvTranspose3d, 4, 5, 2, 2),
}
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def make_pair(name, dtype=torch.float32, **options):
    """Return a fast convolution, and torch's in float64 with equal weights."""
    kind, channels, kernel, stride, padding = CONVOLUTIONS[name]
    fast = kind(channels, channels, kernel, stride, padding, groups=channels, **options).to(dtype)
    plain = deepcopy(fast).double()
    assert use_fast_depthwise(fast) == 1
    return fast, plain


def run(module, x, upper):
    """Return the output and all gradients, as float64."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(upper[:, :, : y.shape[2], : y.shape[3], : y.shape[4]].to(y.dtype))
    return [t.double() for t in (y.detach(), x.grad, *(p.grad for p in module.parameters()))]


def compute_weight_gradient_plainly(x, g, kernel, stride, padding):
    """Correlate each channel of the input with the gradient of the output, tap by tap."""
    before_after = [p for n in reversed(padding) for p in (n, n)]
    x, taps = nn.functional.pad(x.double(), before_after), []
    for offset in torch.cartesian_prod(*map(torch.arange, kernel)).tolist():
        steps = zip(offset, g.shape[2:], stride, strict=True)
        box = [slice(o, o + (n - 1) * s + 1, s) for o, n, s in steps]
        taps.append((x[:, :, *box] * g.double()).sum((0, 2, 3, 4)))
    return torch.stack(taps, 1).unflatten(1, tuple(kernel))[:, None]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_outputs_and_gradients_are_those_of_torch(name, dtype):
    fast, plain = make_pair(name, dtype)
    x = torch.randn(2, fast.in_channels, 9, 8, 7).to(dtype)
    upper = torch.randn(2, fast.in_channels, 19, 19, 19).to(dtype)
    for got, expected in zip(run(fast, x, upper), run(plain, x.double(), upper), strict=True):
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_kernel_of_weight_gradients_equals_its_reference(name):
    _, channels, *geometry = CONVOLUTIONS[name]
    kernel, stride, padding = ([n] * 3 if isinstance(n, int) else n for n in geometry)
    x = torch.randn(2, channels, 9, 8, 7).contiguous(memory_format=torch.channels_last_3d)
    g = nn.functional.conv3d(
        x, torch.randn(channels, 1, *kernel), None, stride, padding, 1, channels
    )
    g = g.contiguous(memory_format=torch.channels_last_3d)
    got = compute_weight_gradient(x, g, kernel, stride, padding)
    expected = compute_weight_gradient_plainly(x, g, kernel, stride, padding)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.max()))


def test_gradients_have_the_same_bits_with_any_number_of_threads():
    fast, _ = make_pair("3")
    x, results = torch.randn(2, 32, 12, 12, 12), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        fast.zero_grad()
        results.append(run(fast, x, x)[2])
    torch.set_num_threads(1)
    assert results[0].equal(results[1])


@pytest.mark.parametrize("name", ["3", "transposed"])
def test_backward_within_autocast_computes_in_the_dtype_of_forward(name):
    fast, plain = make_pair(name)
    x = torch.randn(1, fast.in_channels, 6, 6, 6, requires_grad=True)
    loss = fast(x).square().mean()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    found, x.grad = x.grad, None
    plain(x.double()).square().mean().backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["3", "transposed"])
def test_a_metatensor_keeps_its_metadata(name):
    fast, plain = make_pair(name)
    affine = torch.diag(torch.tensor([2.0, 3.0, 4.0, 1.0]))
    x = MetaTensor(torch.randn(1, fast.in_channels, 9, 9, 9), affine=affine)
    y = fast(x)
    y.mean().backward()
    assert torch.equal(y.affine, affine.to(y.affine))
    torch.testing.assert_close(y.as_tensor(), plain.float()(x).as_tensor(), rtol=1e-5, atol=1e-5)


def test_autocast_computes_in_its_dtype_and_gives_gradients_of_the_weights_dtype():
    fast, plain = make_pair("3")
    x, upper = torch.randn(2, 32, 6, 6, 6), torch.randn(2, 32, 6, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        results = run(fast, x, upper)
        assert fast(x).dtype == torch.bfloat16
    assert fast.weight.grad.dtype == torch.float32
    for got, expected in zip(results, run(plain, x.double(), upper), strict=True):
        assert (got - expected).abs().max() < 2e-2 * expected.abs().max()


@pytest.mark.parametrize("name", ["3", "transposed"])
def test_second_derivatives_are_those_of_torch(name):
    fast, plain = make_pair(name, output_padding=1) if name == "transposed" else make_pair(name)
    x, results = torch.randn(1, fast.in_channels, 4, 5, 3), []
    for module, inputs in ((fast, x), (plain, x.double())):
        inputs = inputs.clone().requires_grad_()
        wanted = [inputs, module.weight]
        slopes = torch.autograd.grad(module(inputs).pow(3).sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(slope.pow(2).sum() for slope in slopes), module.weight)
        results.append(second[0].double())
    assert (results[0] - results[1]).abs().max() < 1e-4 * results[1].abs().max()


def test_second_derivatives_reach_the_layers_before():
    """Of the gradient of the weight by the input, which an earlier layer has computed."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv3d(1, 4, 1), nn.Tanh(), nn.Conv3d(4, 4, 3, padding=1, groups=4))
    fast, x, results = deepcopy(plain), torch.randn(1, 1, 4, 5, 6), []
    use_fast_depthwise(fast)
    for network, inputs in ((fast, x), (plain.double(), x.double())):
        weights = [*network.parameters()]
        loss = network(inputs).sin().mean()
        slopes = torch.autograd.grad(loss, weights, create_graph=True)
        results.append(torch.autograd.grad(sum(s.square().sum() for s in slopes), weights[0]))
    (got,), (expected,) = results
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()


def fill_free_memory():
    """Fill what torch allocates next with NaN, which it must overwrite."""
    for n in range(8, 22, 2):
        tensors = [torch.full((2**n,), torch.nan) for _ in range(8)]
        del tensors


@pytest.mark.parametrize("groups", [8, 4])
def test_gradients_of_maps_shorter_than_a_kernel_are_right(groups):
    """With groups, of a convolution of torch that follows; else of the one that is replaced."""
    torch.manual_seed(0)
    last = nn.Conv3d(8, 8, 7, 2, padding=3, groups=groups)
    network = nn.Sequential(nn.Conv3d(8, 8, 3, padding=1, groups=8), last)
    x, exact = torch.randn(2, 8, 6, 4, 6), deepcopy(network).double()
    use_fast_depthwise(network)
    gradients = []
    for model, data in ((network, x), (exact, x.double())):
        loss = model(data).square().sum()
        fill_free_memory()
        grad = torch.autograd.grad(loss, model[1].weight, create_graph=groups == 8)[0]
        gradients.append(grad.detach().double())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_without_a_compiler_torch_computes_it(monkeypatch):
    fast, plain = make_pair("3")
    monkeypatch.setattr(depthwise.kernels, "libraries", {torch.float32: None})
    monkeypatch.setattr(depthwise.Convolve, "apply", lambda *args: pytest.fail("the kernel ran"))
    x = torch.randn(1, 32, 4, 4, 4)
    torch.testing.assert_close(fast(x).double(), plain(x.double()), rtol=1e-5, atol=1e-5)


def test_other_convolutions_stay_and_weights_keep_their_names():
    others = nn.Conv3d(4, 8, 3, groups=4), nn.Conv3d(4, 4, 3, groups=2), nn.Conv3d(1, 1, 3)
    same, dilated = (
        nn.Conv3d(4, 4, 3, groups=4, **o) for o in ({"padding": "same"}, {"dilation": 2})
    )
    network = nn.Sequential(*others, same, dilated, nn.Conv3d(4, 4, 3, groups=4))
    names, weight = list(network.state_dict()), network[-1].weight
    assert use_fast_depthwise(network) == 1
    assert list(network.state_dict()) == names
    assert network[-1].weight is weight


def test_a_configured_mednext_has_fast_convolutions(composed):
    network = build_network(composed("model=mednext", "model.init_filters=4").step)
    assert use_fast_depthwise(network) == 0
    kinds = {type(block.conv1) for _, block in find_blocks(network)}
    assert kinds == {depthwise.DepthwiseConv3d, depthwise.DepthwiseConvTranspose3d}
