"""Lean blocks against the same network of plain modules, which torch differentiates by itself."""

import copy
import weakref

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from unet3d.config.compose import get_config_dir
from unet3d.errors import UsageError
from unet3d.loss.dice_ce import DiceCE
from unet3d.model.lean import tiled_conv, tiling
from unet3d.model.lean.kernels import cpu
from unet3d.model.unet import LEAN, UNet3D
from unet3d.types import DECODER_WORDS, ENCODER_WORDS, RetentionPolicy

POOLS = sorted(path.stem for path in (get_config_dir() / "pool").glob("[!_]*.yaml"))
KEEPS = [RetentionPolicy((word,), ("store_all",)) for word in ENCODER_WORDS] + [
    RetentionPolicy(("store_last",), (word,)) for word in DECODER_WORDS[1:]
]
MIXED = RetentionPolicy(("stream", "recompute_tiled", "recompute"), ("stream", "store_last"))
NETWORKS = {
    "batch": {},
    "instance, leaky, transposed, supervised": {
        "norm": "instance",
        "activation": "leaky_relu",
        "upsampling": "transposed",
        "deep_supervision": True,
        "depth": 4,
    },
    "group, nearest, flat": {
        "norm": "group",
        "upsampling": "nearest",
        "pool_kernel": [[1, 2, 2], 2],
        "kernel_size": [[1, 3, 3], 3, 5],
    },
    "narrow first, 1 2 3 convolutions": {
        "upsampling": "transposed_wide",
        "narrow_first": True,
        "convs_per_level": [1, 2, 3],
    },
    "no norm, wide decoder": {"norm": "none", "decoder_channels": [6, 4]},
}
SIZES = {"even": (32, 16, 16), "odd": (19, 23, 17), "long H": (9, 34, 12)}


@pytest.fixture
def in_slabs(monkeypatch):
    """Slabs of a few rows, which only large volumes have otherwise."""
    monkeypatch.setattr(tiling, "SLAB_BYTES", 1)
    monkeypatch.setattr(tiling, "LEAST_ROWS", 3)


def pair(keep, dtype=torch.float64, **choices):
    """A network of plain modules and its lean twin."""
    torch.manual_seed(0)
    chosen = {"depth": 3, "width": 4, "pool": nn.MaxPool3d, **choices}
    plain = UNet3D(in_channels=2, num_classes=3, **chosen).to(dtype)
    lean = copy.deepcopy(plain)
    plain.keep, lean.keep = None, keep
    return plain, lean


def batch(size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 2, *size, generator=generator, dtype=dtype)
    return x, torch.randint(0, 3, (2, *size), generator=generator).to(torch.uint8)


def two_steps(model, x, labels):
    """Losses, gradients of parameters and image, and the state after two optimizer steps."""
    loss, optimizer = DiceCE(), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    found = []
    for _ in range(2):
        image = x.clone().requires_grad_()
        optimizer.zero_grad()
        value = loss(model(image), labels)
        value.backward()
        found += [value.detach(), image.grad, *(p.grad for p in model.parameters())]
        optimizer.step()
    return found, model.state_dict()


def assert_equal_steps(plain, lean, x, labels):
    (expected, state), (found, lean_state) = two_steps(plain, x, labels), two_steps(lean, x, labels)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert list(state) == list(lean_state)
    for name, value in state.items():
        torch.testing.assert_close(lean_state[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("choices", NETWORKS)
def test_one_slab_gives_the_gradients_and_the_state_of_plain_modules(choices, size):
    assert_equal_steps(*pair(LEAN, **NETWORKS[choices]), *batch(SIZES[size]))


@pytest.mark.parametrize("keep", [*KEEPS, MIXED], ids=lambda k: f"{k.encoders}-{k.decoders}")
@pytest.mark.parametrize("choices", NETWORKS)
def test_slabs_give_the_same_whatever_is_kept(choices, keep, in_slabs):
    assert_equal_steps(*pair(keep, **NETWORKS[choices]), *batch(SIZES["odd"]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_every_pooling_is_part_of_its_block(pool, size, activation, in_slabs):
    factory = instantiate(OmegaConf.load(get_config_dir() / "pool" / f"{pool}.yaml"))
    nets = pair(MIXED, pool=factory, activation=activation)
    assert_equal_steps(*nets, *batch(SIZES[size]))


@pytest.mark.parametrize("norm", ["batch", "instance", "group"])
def test_evaluation_gives_the_same_logits(norm, in_slabs):
    plain, lean = pair(LEAN, norm=norm, deep_supervision=True, depth=4)
    x, labels = batch((33, 16, 18))
    for model in (plain, lean):
        two_steps(model, x, labels)
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(lean(x), plain(x), rtol=1e-9, atol=1e-9)


def test_a_gradient_through_evaluation_is_that_of_fixed_statistics(in_slabs):
    plain, lean = pair(MIXED)
    assert_equal_steps(plain.eval(), lean.eval(), *batch(SIZES["odd"]))


def test_frozen_parts_get_no_gradient_and_the_others_the_same(in_slabs):
    nets = pair(LEAN, upsampling="transposed")
    x, labels = batch(SIZES["odd"])
    for model in nets:
        model.encoder.requires_grad_(False)
        model.decoder[0].convs.requires_grad_(False)
        DiceCE()(model(x), labels).backward()
    for a, b in zip(*(model.parameters() for model in nets), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-9, atol=1e-12)


def errors(model, judge, x, labels, autocast=None):
    """How far a model's gradients are from the judge's in float64, as a share of their size."""
    device = x.device.type
    with torch.autocast(device, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        outputs = model(x)
    DiceCE()(outputs, labels).backward()
    found = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    return float((found - judge).norm() / judge.norm())


def median_ratio_of_errors(device, autocast, choices):
    """Of the lean network's error to that of plain modules, over a few inputs."""
    ratios = []
    for seed in range(5):
        plain, lean = (m.to(device) for m in pair(MIXED, torch.float32, **NETWORKS[choices]))
        judge = copy.deepcopy(plain).double()
        x, labels = (t.to(device) for t in batch((24, 16, 16), torch.float32))
        x = x + seed
        DiceCE()(judge(x.double()), labels).backward()
        exact = torch.cat([p.grad.flatten() for p in judge.parameters()])
        found = [errors(m, exact, x, labels, autocast) for m in (lean, plain)]
        ratios.append(found[0] / found[1])
    return sorted(ratios)[2]


LOW = pytest.mark.parametrize(
    "choices", ["batch", "instance, leaky, transposed, supervised", "group, nearest, flat"]
)


@LOW
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bf16"])
def test_in_lower_precision_errors_are_those_of_plain_modules(choices, autocast, in_slabs):
    cpu.kernels.library(autocast or torch.float32)
    assert median_ratio_of_errors("cpu", autocast, choices) < 1.3


@pytest.mark.gpu
@LOW
@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu_errors_are_those_of_plain_modules_too(choices, autocast, in_slabs):
    assert median_ratio_of_errors("cuda", autocast, choices) < 1.3


def test_logits_have_the_precision_of_the_step():
    _, lean = pair(LEAN, torch.float32)
    x, _ = batch(SIZES["even"], torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lean(x).dtype == torch.bfloat16
    assert lean.to(torch.bfloat16)(x).dtype == torch.bfloat16


def test_a_second_backward_is_answered_in_words():
    _, lean = pair(LEAN)
    loss = lean(batch(SIZES["even"])[0]).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


def test_a_second_derivative_is_answered_in_words():
    _, lean = pair(LEAN)
    x = batch(SIZES["even"])[0].requires_grad_()
    (first,) = torch.autograd.grad(lean(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_a_backward_hook_is_refused_and_not_ignored():
    _, lean = pair(LEAN)
    lean.decoder[0].convs[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="backward hook"):
        lean(batch(SIZES["even"])[0])


def test_what_is_compiled_are_plain_modules():
    plain, lean = pair(LEAN)
    x, _ = batch(SIZES["even"])
    compiled = torch.compile(lean, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x))


def test_a_step_that_is_given_up_leaves_nothing_behind():
    """No cycle of references that would hold the maps until the garbage is collected."""
    _, lean = pair(MIXED)
    logits = lean(batch(SIZES["even"])[0])
    block = weakref.ref(logits.grad_fn.block)
    del logits
    assert block() is None


def test_a_norm_that_blocks_do_not_know_is_refused():
    _, lean = pair(LEAN)
    lean.encoder[0].convs[0].norm = nn.InstanceNorm3d(4, track_running_stats=True).double()
    with pytest.raises(UsageError, match="batch, instance and group norm"):
        lean(batch(SIZES["even"])[0])


def test_a_depth_of_two_has_weight_gradients_in_bfloat16_on_a_cpu():
    """Where oneDNN's own are partly unset memory."""
    x, g = torch.randn(2, 2, 4, 2, 8, 8).bfloat16()
    weight = torch.randn(4, 4, 3, 3, 3).bfloat16()
    args = [1, 1, 1]
    for _ in range(20):
        torch.full((4 * 16 * 16 * 27,), torch.inf)  # what unset memory may hold
        found = tiled_conv._to_weight(g, x, weight, args)
        exact = torch.nn.grad.conv3d_weight(x.double(), weight.shape, g.double(), padding=1)
        torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=1e-2)
