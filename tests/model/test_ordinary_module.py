"""A UNet3D is an ordinary module: what users of PyTorch do to it has its effect, or is refused."""

import copy
import warnings

import onnxruntime
import pytest
import torch
from monai.data import MetaTensor
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode

import unet3d
from unet3d.errors import UsageError
from unet3d.loss.overlap import DiceCE


def make_network(**options):
    torch.manual_seed(0)
    options = {"in_channels": 1, "num_classes": 2, "depth": 2, "width": 4, **options}
    return unet3d.UNet3D(**options).double()


def make_image():
    return torch.randn(2, 1, 8, 8, 8, generator=torch.Generator().manual_seed(1)).double()


class LearnedPool3d(nn.Conv3d):
    def __init__(self):
        super().__init__(4, 4, 2, stride=2)


def get_layer(network):
    return network.encoder[0].convs[1]


CHANGES = {
    "weight_norm": lambda n: parametrizations.weight_norm(get_layer(n).conv),
    "pruning": lambda n: prune.l1_unstructured(get_layer(n).conv, "weight", amount=0.5),
    "padding_mode": lambda n: setattr(
        get_layer(n), "conv", nn.Conv3d(4, 4, 3, padding=1, padding_mode="reflect")
    ),
    "dilation": lambda n: setattr(get_layer(n), "conv", nn.Conv3d(4, 4, 3, padding=2, dilation=2)),
    "groups": lambda n: setattr(get_layer(n), "conv", nn.Conv3d(4, 4, 3, padding=1, groups=2)),
    "norm": lambda n: setattr(get_layer(n), "norm", nn.LocalResponseNorm(2)),
    "dropout": lambda n: get_layer(n).append(nn.Dropout3d(0.999)),
    "pooling with weights": lambda n: setattr(n.encoder[0], "pool", LearnedPool3d()),
    "pooling with random numbers": lambda n: setattr(
        n.encoder[0], "pool", nn.Sequential(nn.MaxPool3d(2), nn.Dropout(0.5))
    ),
    "overlapping pooling": lambda n: setattr(n.encoder[0], "pool", nn.MaxPool3d(3, 2, 1)),
    "upsampling": lambda n: setattr(n.decoder[0], "up", nn.Upsample(scale_factor=2, mode="area")),
    "head": lambda n: n.heads.__setitem__(0, nn.Conv3d(4, 2, 3, padding=1)),
    "stride of a head": lambda n: setattr(n.heads[0], "stride", (2, 2, 2)),
    "norm without bias": lambda n: setattr(get_layer(n).norm, "bias", None),
    "stochastic depth": lambda n: setattr(n.encoder[0].convs[1], "drop_path", nn.Identity()),
    "stride of a convolution": lambda n: setattr(get_layer(n).conv, "stride", (2, 2, 2)),
    "norm as activation": lambda n: setattr(get_layer(n), "act", nn.GroupNorm(2, 4)),
    "weight standardization": lambda n: setattr(
        get_layer(n).conv,
        "_conv_forward",
        lambda x, w, b: nn.functional.conv3d(x, w - w.mean(), b, padding=1),
    ),
    "features instead of logits": lambda n: n.heads.__setitem__(0, nn.Identity()),
    "activation of a residual block": lambda n: setattr(
        n.encoder[0].convs[1].conv2, "act", nn.ReLU()
    ),
    "projection of a residual block": lambda n: setattr(
        n.encoder[0].convs[2], "projection", copy.deepcopy(n.encoder[0].convs[2].conv2)
    ),
    "another forward": lambda n: setattr(get_layer(n).act, "forward", torch.sin),
    "forward pre-hook": lambda n: get_layer(n).register_forward_pre_hook(lambda m, i: i[0] * 2),
    "backward hook": lambda n: get_layer(n).register_full_backward_hook(
        lambda m, to_input, to_output: (to_input[0] * 2,)
    ),
    "backward hook of a block": lambda n: n.decoder[0].register_full_backward_pre_hook(
        lambda m, to_output: (to_output[0] * 2,)
    ),
}


def run(network):
    """Return logits and gradients, by name."""
    torch.manual_seed(2)
    logits = network(make_image())
    logits.square().sum().backward()
    named = network.named_parameters()
    return {"logits": logits} | {name: p.grad for name, p in named if p.requires_grad}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_network_computes_what_plain_modules_compute(change):
    is_residual = "residual" in change or change == "stochastic depth"
    options = {"residual_blocks": 2} if is_residual else {}
    networks = [make_network(fused=fused, **options) for fused in (True, False)]
    for network in networks:
        torch.manual_seed(3)
        CHANGES[change](network)
        network.double()
    with pytest.warns(UserWarning, match=r"^(encoder|decoder|heads)\.0.* runs as plain modules"):
        fused = run(networks[0])
    plain = run(networks[1])
    assert not any(gradient is None for gradient in fused.values())
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-9, atol=1e-9)


GLOBAL_HOOKS = {
    "forward": lambda module, inputs, output: None,
    "forward_pre": lambda module, inputs: None,
    "full_backward": lambda module, to_input, to_output: None,
    "full_backward_pre": lambda module, to_output: None,
}


@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
def test_a_hook_on_every_module_sees_those_inside(kind):
    seen, network = [], make_network()
    for module in network.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # torch's backward hooks refuse it

    def watch(module, *given):
        seen.append(type(module))
        return GLOBAL_HOOKS[kind](module, *given)

    register = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")
    with register(watch), pytest.warns(UserWarning, match="a hook on every module: the network"):
        network(make_image().requires_grad_()).sum().backward()
    assert nn.Conv3d in seen


def test_torch_counts_the_operations_of_fused_blocks():
    network = make_network()
    with FlopCounterMode(display=False) as counter:
        network(make_image())
    assert counter.get_total_flops() > 0
    assert network._warned_of is None


def test_a_forward_that_is_replaced_for_all_modules_of_a_kind_runs(monkeypatch):
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x.sin())
    with pytest.warns(UserWarning, match=r"\(ReLU\) is not a module that UNet3D builds"):
        fused = run(make_network())
    for name, value in run(make_network(fused=False)).items():
        torch.testing.assert_close(fused[name], value)


def test_a_network_on_the_output_of_another_refuses_that_it_changes_in_place():
    first, second = make_network(), make_network(in_channels=2)
    middle = first(make_image())
    logits = second(middle)
    middle.sigmoid_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (middle.mean() + logits.square().mean()).backward()


def test_the_metadata_of_monai_reaches_the_output():
    image = MetaTensor(make_image().float(), affine=torch.diag(torch.tensor([2.0, 3, 4, 1])))
    logits = make_network().float()(image)
    assert isinstance(logits, MetaTensor)
    torch.testing.assert_close(logits.affine, image.affine)
    logits.square().sum().backward()


def test_a_loss_takes_the_logits_of_an_image_of_monai():
    network, image = make_network().float(), make_image().float()
    label, results = torch.zeros(len(image), *image.shape[2:], dtype=torch.uint8), []
    for kind in (torch.as_tensor, MetaTensor):
        network.zero_grad()
        loss = DiceCE()(network(kind(image)), label)
        loss.backward()
        results.append([torch.as_tensor(loss.detach()), *(p.grad for p in network.parameters())])
    assert all(map(torch.equal, *results))


def test_a_network_in_float64_computes_in_float64_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        logits = [make_network(fused=fused)(make_image()) for fused in (True, False)]
    assert logits[0].dtype == torch.float64
    torch.testing.assert_close(*logits)


class NegatedMaxPool3d(unet3d.MaxPool3d):
    by_window = True

    def forward(self, x):
        return -super().forward(-x)


def test_a_pooling_that_extends_one_of_ours_has_its_own_gradient():
    fused, plain = (run(make_network(fused=f, pool=NegatedMaxPool3d)) for f in (True, False))
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_batch_of_another_dtype_than_the_weights_is_refused_as_by_torch(dtype):
    for fused in (True, False):
        with pytest.raises(RuntimeError, match=r"^Input type .* should be the same"):
            make_network(fused=fused)(make_image().to(dtype))
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="type"):
            make_network(fused=fused).float()(make_image())


def test_shapes_are_computed_on_the_meta_device():
    logits = make_network().to("meta")(make_image().to("meta"))
    assert logits.shape == (2, 2, 8, 8, 8)


def test_the_old_exporter_to_onnx_passes_arguments_by_position(tmp_path):
    network = make_network().float().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and traces plain modules
        torch.onnx.export(network, (make_image().float(),), tmp_path / "a.onnx", dynamo=False)
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    image = make_image().float()
    logits = session.run(None, {session.get_inputs()[0].name: image.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(logits), network(image), rtol=1e-4, atol=1e-5)


TRANSFORMS = {
    "torch.jit.trace": lambda network, x: torch.jit.trace(network, x)(2 * x),
    "torch.func.vmap": lambda network, x: torch.vmap(network)(torch.stack([x, 2 * x]))[1],
    "torch.func.grad": lambda network, x: torch.func.grad(lambda x: network(x).square().sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("pool", ["max", "avg", "median", "approx_median"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning")  # torch 2.14
def test_transforms_of_torch_run_plain_modules(name, pool):
    network, plain = (
        make_network(norm="instance", pool=pool, fused=f).eval() for f in (True, False)
    )
    x = make_image()
    with pytest.warns(UserWarning, match=r"^torch.(jit.trace|func) .* runs as plain modules"):
        result = TRANSFORMS[name](network, x)
    expected = plain(2 * x)
    if name == "torch.func.grad":
        x.requires_grad_()
        (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    torch.testing.assert_close(result, expected)


def test_a_batch_without_volumes_has_gradients_of_zero():
    network = make_network()
    network(make_image()[:0]).sum().backward()
    assert not any(p.grad.any() for p in network.parameters())


def test_statistics_that_are_not_tracked_stay_as_they_are():
    network = make_network()
    norm = get_layer(network).norm
    norm.track_running_stats = False
    run(network)
    assert not norm.running_mean.any()
    assert norm.num_batches_tracked == 0


def replace_by_function(network, weights):
    """Compute the loss as first-order MAML and hypernetworks do."""
    return torch.func.functional_call(network, weights, make_image()).square().sum()


def replace_by_tensors(network, weights):
    """Put tensors in the place of parameters, as hypernetworks do."""
    for name, tensor in weights.items():
        module = network.get_submodule(name.rpartition(".")[0])
        delattr(module, name.rpartition(".")[2])
        setattr(module, name.rpartition(".")[2], tensor)
    return network(make_image()).square().sum()


@pytest.mark.parametrize("replace", [replace_by_function, replace_by_tensors])
@pytest.mark.parametrize("options", [{}, {"residual_blocks": 1, "upsampling": "transposed"}])
def test_gradients_are_those_of_the_tensors_that_replaced_parameters(replace, options):
    results = []
    for fused in (True, False):
        network = make_network(fused=fused, **options)
        named = network.named_parameters()
        weights = {name: (p.detach() * 1.1).requires_grad_() for name, p in named}
        loss = replace(network, {name: weight * 1 for name, weight in weights.items()})
        results.append(torch.autograd.grad(loss, list(weights.values())))
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["image", "encoder.0.convs.1.conv.weight", "heads.0.weight"])
def test_tensors_that_change_between_forward_and_backward_are_refused(name):
    network, image = make_network(), make_image()
    loss = network(image).square().sum()
    with torch.no_grad():
        (image if name == "image" else network.get_parameter(name)).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_is_an_error_with_fused_blocks():
    logits = make_network()(make_image())
    logits.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"retain_graph=True, .* fused=False"):
        logits.sum().backward()


def test_a_gradient_penalty_is_an_error_with_fused_blocks_and_has_a_gradient_without():
    def compute_penalty(network):
        image = make_image().requires_grad_()
        (slope,) = torch.autograd.grad(network(image).sum(), image, create_graph=True)
        slope.square().sum().backward()
        return next(network.parameters()).grad

    with pytest.raises(RuntimeError, match=r"create_graph=True, or build .* fused=False"):
        compute_penalty(make_network())
    assert compute_penalty(make_network(fused=False)).abs().sum() > 0


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 8, 8, 8), r"^the network takes 1 channels, got 3 in a batch of shape \(2, 3, 8"),
        ((1, 8, 8, 8), r"takes batches .* shape \(1, 8, 8, 8\): add the batch with x\[None"),
        ((2, 1, 8, 8, 8), r"takes floating-point numbers, got torch.int64: use x.float\(\)"),
        ((8, 8), r"takes batches of volumes \(B, C, D, H, W\), got .* shape \(8, 8\)$"),
    ],
)
def test_an_input_of_another_shape_is_one_clear_line(shape, message):
    with pytest.raises(UsageError, match=message):
        make_network()(torch.zeros(shape).long() if shape[1] == 1 else torch.zeros(shape).double())


def test_a_first_convolution_with_more_channels_takes_them():
    network = make_network()
    network.encoder[0].convs[0].conv = nn.Conv3d(3, 4, 3, padding=1).double()
    assert network(torch.randn(2, 3, 8, 8, 8).double()).shape == (2, 2, 8, 8, 8)
