"""Fused blocks against the same network of plain modules, differentiated by autograd."""

import copy
import gc
import weakref
from functools import cache, partial

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from unet3d.config.compose import get_config_dir
from unet3d.loss.overlap import DiceCE
from unet3d.model.blocks import Strided
from unet3d.model.fused import node, tiled_conv, tiling
from unet3d.model.fused.kernels import cpu
from unet3d.model.unet import FUSED, UNet3D
from unet3d.types import DECODER_MODES, ENCODER_MODES, Retention

POOLS = sorted(path.stem for path in (get_config_dir() / "pool").glob("[!_]*.yaml"))
POLICIES = [Retention((word,), ("store_all",)) for word in ENCODER_MODES] + [
    Retention(("store_last",), (word,)) for word in DECODER_MODES[1:]
]
MIXED = Retention(("stream", "recompute_tiled", "recompute"), ("stream", "store_last"))
STRIDED = partial(Strided, skip_pool=nn.AvgPool3d)
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
        "halve_first_conv": True,
        "convs_per_level": [1, 2, 3],
    },
    "no norm, wide decoder": {"norm": "none", "decoder_channels": [6, 4]},
    "strided": {"pool": STRIDED, "norm": "instance", "convs_per_level": [2, 1, 2]},
    "residual, strided": {
        "pool": STRIDED,
        "residual_blocks": [1, 3, 2, 1],
        "convs_per_level": 1,
        "norm": "instance",
        "activation": "leaky_relu",
        "upsampling": "transposed",
        "deep_supervision": True,
        "depth": 4,
    },
    "residual, strided by 1 2 3, batch": {
        "pool": STRIDED,
        "residual_blocks": [2, 1, 2],
        "pool_kernel": [[1, 2, 2], [2, 3, 2]],
        "kernel_size": [[1, 3, 3], 3, 5],
        "max_width": 8,
    },
    "residual, pooled, group": {"residual_blocks": [1, 2], "norm": "group", "max_width": 8},
    "residual, no norm": {"residual_blocks": [1, 2], "norm": "none", "pool": STRIDED},
}
SIZES = {"even": (32, 16, 16), "odd": (13, 19, 17), "long H": (9, 34, 12)}


@pytest.fixture
def small_tiles(monkeypatch):
    """Use tiles of a few rows, as only large volumes have otherwise."""
    monkeypatch.setitem(tiling.TILE_BYTES, "cpu", 1)
    monkeypatch.setitem(tiling.NO_GRAD_TILE_BYTES, "cpu", 1)
    monkeypatch.setattr(tiling, "MIN_ROWS", 3)


def make_pair(policy, dtype=torch.float64, **options):
    """Build a network of plain modules and its copy with fused blocks."""
    torch.manual_seed(0)
    options = {"depth": 3, "width": 4, "pool": nn.MaxPool3d, **options}
    plain = UNet3D(in_channels=2, num_classes=3, **options).to(dtype)
    for name, p in plain.named_parameters():
        if name.endswith("norm.weight"):  # no residual block begins as its skip
            nn.init.uniform_(p, 0.5, 1.5)
    fused = copy.deepcopy(plain)
    plain.retention, fused.retention = None, policy
    return plain, fused


def make_batch(size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 2, *size, generator=generator, dtype=dtype)
    return x, torch.randint(0, 3, (2, *size), generator=generator).to(torch.uint8)


def run_two_steps(model, x, labels):
    """Return losses, gradients of parameters and image, and the state dict, over two steps."""
    loss, optimizer = DiceCE(), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    results = []
    for _ in range(2):
        image = x.clone().requires_grad_()
        optimizer.zero_grad()
        value = loss(model(image), labels)
        value.backward()
        results += [value.detach(), image.grad, *(p.grad for p in model.parameters())]
        optimizer.step()
    return results, model.state_dict()


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def assert_equal_steps(plain, fused, x, labels):
    assert_equal_results(run_two_steps(plain, x, labels), run_two_steps(fused, x, labels))


def assert_equal_results(plain, fused):
    for a, b in zip(fused[0], plain[0], strict=True):
        assert_close(a, b)
    assert list(plain[1]) == list(fused[1])
    for name, value in plain[1].items():
        torch.testing.assert_close(fused[1][name], value, rtol=1e-9, atol=1e-11)


@cache
def run_plain(network, size):
    """Return the results of plain modules, with which every policy is compared."""
    return run_two_steps(make_pair(FUSED, **NETWORKS[network])[0], *make_batch(SIZES[size]))


def assert_equal_to_plain(network, policy, size):
    _, fused = make_pair(policy, **NETWORKS[network])
    results = run_two_steps(fused, *make_batch(SIZES[size]))
    assert_equal_results(run_plain(network, size), results)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("network", NETWORKS)
def test_fused_blocks_have_the_gradients_and_state_of_plain_modules(network, size):
    assert_equal_to_plain(network, FUSED, size)


@pytest.mark.parametrize("policy", [*POLICIES, MIXED], ids=lambda p: f"{p.encoders}-{p.decoders}")
@pytest.mark.parametrize("network", NETWORKS)
def test_tiles_have_the_same_gradients_under_every_policy(network, policy, small_tiles):
    assert_equal_to_plain(network, policy, "odd")


@pytest.mark.parametrize("size", ["odd", "long H"])
@pytest.mark.parametrize("pool", POOLS)
def test_every_pooling_runs_inside_its_block(pool, size, small_tiles):
    factory = instantiate(OmegaConf.load(get_config_dir() / "pool" / f"{pool}.yaml"))
    networks = make_pair(MIXED, pool=factory, activation="leaky_relu")
    assert_equal_steps(*networks, *make_batch(SIZES[size]))


@pytest.mark.parametrize("levels", [{}, NETWORKS["residual, strided"]], ids=["plain", "residual"])
@pytest.mark.parametrize("norm", ["batch", "instance", "group"])
def test_evaluation_gives_the_same_logits(norm, levels, small_tiles):
    options = {"deep_supervision": True, "depth": 4, **levels, "norm": norm}
    plain, fused = make_pair(FUSED, **options)
    x, labels = make_batch((33, 16, 18))
    for model in (plain, fused):
        run_two_steps(model, x, labels)
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(fused(x), plain(x), rtol=1e-9, atol=1e-9)


def test_gradients_in_evaluation_mode_use_the_running_statistics(small_tiles):
    plain, fused = make_pair(MIXED)
    assert_equal_steps(plain.eval(), fused.eval(), *make_batch(SIZES["odd"]))


@pytest.mark.parametrize("policy", [FUSED, MIXED], ids=["fused", "mixed"])
def test_stochastic_depth_drops_the_same_volumes(policy, small_tiles):
    options = {**NETWORKS["residual, strided by 1 2 3, batch"], "stochastic_depth": 0.5}
    networks, losses = make_pair(policy, **options), []
    x, labels = make_batch(SIZES["odd"])
    for model in networks:
        torch.manual_seed(3)
        losses.append(DiceCE()(model(x), labels))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    for a, b in zip(*(model.parameters() for model in networks), strict=True):
        assert_close(b.grad, a.grad)
    torch.manual_seed(4)
    assert networks[1](x).sum() != networks[1](x).sum()


@pytest.mark.parametrize("network", ["narrow", "residual, strided"])
@pytest.mark.parametrize(
    "frozen",
    [
        ["encoder", "decoder.0.convs"],
        ["encoder.0", "decoder.1.up"],  # the last skip, and what joins it to the levels below
        ["encoder.0", "encoder.1"],
    ],
)
def test_frozen_parameters_get_no_gradient_and_the_others_the_same(frozen, network, small_tiles):
    networks = make_pair(FUSED, **NETWORKS.get(network, {"upsampling": "transposed"}))
    x, labels = make_batch(SIZES["odd"])
    for model in networks:
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        DiceCE()(model(x), labels).backward()
    for a, b in zip(*(model.parameters() for model in networks), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert_close(b.grad, a.grad)


def gradient_error(model, exact, x, labels, autocast=None):
    """Return the relative error of a model's gradients."""
    device = x.device.type
    with torch.autocast(device, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        outputs = model(x)
    DiceCE()(outputs, labels).backward()
    gradients = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    return float((gradients - exact).norm() / exact.norm())


def median_error_ratio(device, autocast, network):
    """Return the fused network's gradient error over that of plain modules, for a few inputs."""
    ratios = []
    for seed in range(5):
        plain, fused = (m.to(device) for m in make_pair(MIXED, torch.float32, **NETWORKS[network]))
        reference = copy.deepcopy(plain).double()
        x, labels = (t.to(device) for t in make_batch((24, 16, 16), torch.float32))
        x = x + seed
        DiceCE()(reference(x.double()), labels).backward()
        exact = torch.cat([p.grad.flatten() for p in reference.parameters()])
        errors = [gradient_error(m, exact, x, labels, autocast) for m in (fused, plain)]
        ratios.append(errors[0] / errors[1])
    return sorted(ratios)[2]


THREE_NETWORKS = pytest.mark.parametrize(
    "network", ["batch", "instance, leaky, transposed, supervised", "group, nearest, flat"]
)


@THREE_NETWORKS
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bf16"])
def test_rounding_errors_are_those_of_plain_modules(network, autocast, small_tiles):
    cpu.kernels.library(autocast or torch.float32)
    assert median_error_ratio("cpu", autocast, network) < 1.3


@pytest.mark.gpu
@THREE_NETWORKS
@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16], ids=str)
def test_rounding_errors_on_a_gpu_are_those_of_plain_modules(network, autocast, small_tiles):
    assert median_error_ratio("cuda", autocast, network) < 1.3


def test_logits_have_the_dtype_of_the_step():
    _, fused = make_pair(FUSED, torch.float32)
    x, _ = make_batch(SIZES["even"], torch.float32)
    assert fused.to(torch.bfloat16)(x).dtype == torch.bfloat16


def test_torch_compile_sees_plain_modules():
    plain, fused = make_pair(FUSED)
    x, _ = make_batch(SIZES["even"])
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x))


@pytest.mark.parametrize("network", ["strided", "residual, strided", "residual, pooled, group"])
@pytest.mark.parametrize("policy", [FUSED, MIXED], ids=["fused", "mixed"])
def test_a_step_and_discarded_logits_free_their_blocks(network, policy, monkeypatch):
    blocks = weakref.WeakSet()
    remember = node.Block.__init__
    monkeypatch.setattr(
        node.Block, "__init__", lambda self, *args: (blocks.add(self), remember(self, *args))[1]
    )
    _, fused = make_pair(policy, **NETWORKS[network])
    x, labels = make_batch(SIZES["even"])
    gc.disable()
    try:
        DiceCE()(fused(x), labels).backward()
        assert not list(blocks)
        fused(x)  # discarded logits
        assert not list(blocks)
    finally:
        gc.enable()


def test_a_depth_of_two_has_bfloat16_weight_gradients_on_a_cpu():
    """The gradient of oneDNN is partly uninitialized memory."""
    x, g = torch.randn(2, 2, 4, 2, 8, 8).bfloat16()
    weight = torch.randn(4, 4, 3, 3, 3).bfloat16()
    padding = [1, 1, 1]
    for _ in range(20):
        torch.full((4 * 16 * 16 * 27,), torch.inf)  # what uninitialized memory may hold
        gradient = tiled_conv.compute_weight_gradient(g, x, weight, padding)
        exact = torch.nn.grad.conv3d_weight(x.double(), weight.shape, g.double(), padding=1)
        torch.testing.assert_close(gradient.double(), exact, atol=1e-3, rtol=1e-2)
