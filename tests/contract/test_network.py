"""UNet3D is a plain U-Net that stores less: same names, loss, gradients and buffers."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import nn

import unet3d as package
from tests.contract.helpers.components import build, compose, saved_bytes
from tests.contract.helpers.plain import PlainUNet, dice_ce

STRATEGIES = ("none", "fused", "skips", "lean", "leanest", "offload", "blocks")
SIZES = {"even": (20, 12, 8), "odd": (21, 13, 11)}
OPTIONS = {"in_channels": 2, "num_classes": 3, "depth": 3, "width": 4}


def median(x):
    """Return the mean of the two middle values of windows of 2 x 2 x 2."""
    windows = x.unfold(2, 2, 2).unfold(3, 2, 2).unfold(4, 2, 2).flatten(5)
    return windows.sort(-1).values[..., 3:5].mean(-1)


def approximate_median(x, tau=0.1):
    """Return the mean of the soft means around the two middle values."""
    windows = x.unfold(2, 2, 2).unfold(3, 2, 2).unfold(4, 2, 2).flatten(5)
    centers = windows.sort(-1).values[..., 3:5]
    weights = torch.softmax(-(windows[..., None] - centers[..., None, :]).abs() / tau, dim=-2)
    return (weights * windows[..., None]).sum(-2).mean(-1)


PLAIN_POOLS = {
    "max": partial(F.max_pool3d, kernel_size=2),
    "avg": partial(F.avg_pool3d, kernel_size=2),
    "median": median,
    "approx_median": approximate_median,
    "strided": None,
}


def make_batch(size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, 2, *size, generator=generator, dtype=dtype)
    return image, torch.randint(0, 3, (2, *size), generator=generator)


def make_plain(norm="batch", pool="max", slope=0.0):
    torch.manual_seed(0)
    return PlainUNet(2, 3, [4, 8, 16], norm, slope, PLAIN_POOLS[pool]).double()


def train(network, image, labels):
    """Return losses and gradients of two steps, and what they leave in the network."""
    optimizer, results = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9), []
    for _ in range(2):
        x = image.clone().requires_grad_()
        optimizer.zero_grad()
        loss = dice_ce(network(x), labels)
        loss.backward()
        results += [loss.detach(), x.grad, *(p.grad.clone() for p in network.parameters())]
        optimizer.step()
    return results, network.state_dict()


def assert_equal_steps(network, plain, size):
    """Train both from the same weights, in float64."""
    network.load_state_dict(plain.state_dict())
    expected, state = train(plain, *make_batch(SIZES[size]))
    results, own_state = train(network.double(), *make_batch(SIZES[size]))
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-9, atol=1e-12)
    assert list(own_state) == list(state)
    for name, value in state.items():
        torch.testing.assert_close(own_state[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("norm", ["batch", "instance", "group"])
def test_two_steps_equal_those_of_plain_torch(norm, size):
    network = package.UNet3D(**OPTIONS, norm=norm)
    assert_equal_steps(network, make_plain(norm), size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pool", PLAIN_POOLS)
def test_every_pooling_option_equals_its_plain_twin_inside_the_network(pool, size):
    factory = build("pool", f"pool={pool}")
    network = package.UNet3D(**OPTIONS, pool=factory, activation="leaky_relu")
    assert_equal_steps(network, make_plain(pool=pool, slope=0.01), size)


@pytest.mark.parametrize("norm", ["batch", "instance", "group"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_equals_plain_torch(strategy, norm):
    """Tiles of a few rows, as large volumes have, where a strategy has tiles."""
    words = [f"checkpointing={strategy}"]
    if strategy not in ("none", "blocks", "offload"):
        words.append("checkpointing.tile_mib=0.001")
    network = package.UNet3D(**OPTIONS, norm=norm).double()
    build("checkpointing", *words).apply(network)
    assert_equal_steps(network, make_plain(norm), "odd")


@pytest.mark.parametrize("strategy", ["none", "fused", "leanest"])
def test_residual_levels_equal_plain_modules_under_a_strategy(strategy):
    options = {**OPTIONS, "depth": 4, "residual_blocks": [1, 2], "norm": "instance"}
    options |= {"upsampling": "transposed", "deep_supervision": True}
    options["pool"] = build("pool", "pool=strided")
    torch.manual_seed(0)
    plain = package.UNet3D(**options, fused=False).double()
    network = copy.deepcopy(plain)
    build("checkpointing", f"checkpointing={strategy}").apply(network)
    image, labels = make_batch((24, 16, 17))
    losses = []
    for model in (plain, network):
        outputs = model(image)
        assert len(outputs) == 2
        losses.append(dice_ce(outputs[0], labels) + outputs[1].square().mean())
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
    for (name, a), b in zip(plain.named_parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_fused_and_plain_networks_have_the_names_of_released_checkpoints():
    layer = ["conv.weight", "conv.bias", "norm.weight", "norm.bias"]
    layer += ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    levels = ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1"]
    names = [f"{level}.convs.{n}.{name}" for level in levels for n in (0, 1) for name in layer]
    names += ["heads.0.weight", "heads.0.bias"]
    shapes = {name: value.shape for name, value in make_plain().state_dict().items()}
    for fused in (True, False):
        state = package.UNet3D(**OPTIONS, fused=fused).state_dict()
        assert list(state) == names
        assert {name: value.shape for name, value in state.items()} == shapes


def test_a_residual_network_has_the_names_of_released_checkpoints():
    network = package.UNet3D(
        in_channels=1, num_classes=2, depth=2, width=4, residual_blocks=[1, 2], norm="instance"
    )
    blocks = ["encoder.0.convs.1", "encoder.1.convs.0", "encoder.1.convs.1"]
    layers = ["encoder.0.convs.0", *(f"{b}.conv{n}" for b in blocks for n in (1, 2))]
    layers += ["decoder.0.convs.0", "decoder.0.convs.1"]
    names = {
        f"{layer}.{name}"
        for layer in layers
        for name in ("conv.weight", "conv.bias", "norm.weight", "norm.bias")
    }
    names |= {
        f"encoder.1.convs.0.projection.{n}" for n in ("conv.weight", "norm.weight", "norm.bias")
    }
    assert set(network.state_dict()) == names | {"heads.0.weight", "heads.0.bias"}


def test_evaluation_without_gradients_gives_the_same_logits():
    plain = make_plain()
    network = package.UNet3D(**OPTIONS).double()
    train(plain, *make_batch(SIZES["odd"]))
    network.load_state_dict(plain.state_dict())
    image, _ = make_batch(SIZES["odd"])
    with torch.no_grad():
        expected, logits = plain.eval()(image), network.eval()(image)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-10)


def test_a_step_of_a_fused_network_saves_less_than_half_of_what_plain_modules_save():
    image, labels = make_batch((24, 24, 24), torch.float32)
    sizes = {}
    for fused in (True, False):
        network = package.UNet3D(**OPTIONS, fused=fused)
        loss, sizes[fused] = saved_bytes(lambda network=network: dice_ce(network(image), labels))
        loss.backward()
    assert sizes[True] < 0.5 * sizes[False]


@pytest.mark.parametrize("strategy", ["none", "fused", "lean", "leanest"])
def test_bf16_autocast_has_the_error_of_plain_torch(strategy):
    """Gradients are no further away from those of float64 than those of plain torch."""
    plain, (image, labels) = make_plain("instance"), make_batch((16, 16, 16), torch.float32)
    network = package.UNet3D(**OPTIONS, norm="instance")
    build("checkpointing", f"checkpointing={strategy}").apply(network)
    network.load_state_dict(plain.state_dict())

    def compute_gradients(model, x, *, half):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(x)
        assert not half or logits.dtype == torch.bfloat16
        dice_ce(logits.double(), labels).backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    exact = compute_gradients(plain, image.double(), half=False)
    errors = [
        (compute_gradients(model.float(), image, half=True) - exact).norm() / exact.norm()
        for model in (plain, network)
    ]
    assert 0 < errors[1] < 1.5 * errors[0]


def test_a_hook_inside_the_network_fires_and_a_warning_says_that_it_stores_more():
    network, plain, seen = package.UNet3D(**OPTIONS).double(), make_plain(), []
    network.load_state_dict(plain.state_dict())
    image, _ = make_batch(SIZES["even"])
    expected = plain(image)
    hook = (
        network.encoder[0]
        .convs[1]
        .conv.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    )
    with pytest.warns(UserWarning, match=r"encoder\.0\.convs\.1\.conv.*plain modules"):
        logits = network(image)
    assert seen == [(2, 4, *SIZES["even"])]
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-10)
    hook.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(network(image), expected, rtol=1e-9, atol=1e-10)
    assert len(seen) == 1


def test_a_replaced_activation_is_computed():
    network, image = package.UNet3D(**OPTIONS).double(), make_batch(SIZES["even"])[0]
    before = network(image)
    network.encoder[0].convs[1].act = nn.Sigmoid()
    with pytest.warns(UserWarning, match="plain modules"):
        after = network(image)
    assert not torch.allclose(before, after)


def test_hooks_on_the_network_itself_fire_without_a_warning():
    network, seen = package.UNet3D(**OPTIONS), []
    network.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network(make_batch(SIZES["even"], torch.float32)[0])
    assert seen == [(2, 3, *SIZES["even"])]


@pytest.mark.parametrize(
    ("name", "parameters"), [("unet_small", 14_496_517), ("unet_large", 40_158_853)]
)
def test_the_networks_of_the_out_of_memory_example_have_their_sizes(name, parameters):
    config = compose(f"model={name}", "data.num_classes=5", "data.in_channels=1")["model"]
    arguments = {key: value for key, value in config.items() if key != "prior_bias"}
    with torch.device("meta"):
        network = instantiate(arguments, pool="max")
    assert sum(p.numel() for p in network.parameters()) == parameters
