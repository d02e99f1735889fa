"""Fused blocks against the same network of plain modules, differentiated by autograd."""

import copy
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from unet3d.config.compose import get_config_dir
from unet3d.loss.overlap import DiceCE
from unet3d.model.blocks import StochasticDepth, Strided
from unet3d.model.fused import conv_ops, tiling
from unet3d.model.fused.kernels import cpu
from unet3d.model.unet import UNet3D
from unet3d.text import MIB
from unet3d.types import WHOLE_MAPS_MIB, Retention

POOLS = sorted(path.stem for path in (get_config_dir() / "pool").glob("[!_]*.yaml"))
FUSED = Retention()


def make_retention(inner, last, decoder_inner):
    """Make plain and residual levels follow the same rows."""
    options = {"encoder_inner": inner, "encoder_last": last, "decoder_inner": decoder_inner}
    return Retention(**options, residual_inner=inner, residual_last=last)


MIXED = make_retention(
    ("stream", "recompute_tiled", "recompute"),
    ("stream", "recompute_tiled", "recompute"),
    ("stream", "recompute"),
)
POLICIES = [  # every policy at full resolution and below, and pairs that no strategy has
    MIXED,
    make_retention(("store", "stream"), ("stream", "store"), ("recompute_tiled", "stream")),
    make_retention(("recompute", "store"), ("recompute_tiled", "recompute"), ("store",)),
    make_retention(
        ("store_later", "recompute_tiled"), ("recompute", "stream"), ("recompute", "store")
    ),
    make_retention(
        ("recompute_tiled", "store_later", "stream"),
        ("store", "recompute_tiled", "recompute"),
        ("stream", "recompute_tiled"),
    ),
]
MORE_POLICIES = [pytest.param(policy, marks=pytest.mark.slow) for policy in POLICIES[1:]]
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
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = {"even": (16, 8, 16), "odd": (13, 19, 17), "long H": (9, 26, 12)}


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


def run_steps(model, x, labels, steps=1):
    """Return losses, gradients of parameters and image, and what the steps leave in the network."""
    loss, optimizer = DiceCE(), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    results = []
    for _ in range(steps):
        image = x.clone().requires_grad_()
        optimizer.zero_grad()
        value = loss(model(image), labels)
        value.backward()
        results += [value.detach(), image.grad, *(p.grad for p in model.parameters())]
        optimizer.step()
    return [*results, *model.state_dict().values()]


def assert_equal_results(results, expected):
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@cache
def run_plain(network, size, steps):
    """Return the results of plain modules, with which every policy is compared."""
    plain, _ = make_pair(FUSED, **NETWORKS[network])
    return run_steps(plain, *make_batch(SIZES[size]), steps)


def assert_equal_to_plain(network, policy, size, steps):
    _, fused = make_pair(policy, **NETWORKS[network])
    results = run_steps(fused, *make_batch(SIZES[size]), steps)
    assert_equal_results(results, run_plain(network, size, steps))


@pytest.mark.parametrize("size", ["even", "long H"])
@pytest.mark.parametrize("network", NETWORKS)
def test_fused_blocks_have_the_gradients_and_state_of_plain_modules(network, size):
    assert_equal_to_plain(network, FUSED, size, steps=2)


@pytest.mark.parametrize("policy", [FUSED, *MORE_POLICIES], ids=lambda p: f"{p.encoder_inner}")
@pytest.mark.parametrize("network", NETWORKS)
def test_whole_maps_have_the_same_gradients(network, policy):
    whole = replace(policy, tile_bytes=WHOLE_MAPS_MIB * MIB)
    assert_equal_to_plain(network, whole, "odd", steps=1)


@pytest.mark.parametrize("policy", [MIXED, *MORE_POLICIES], ids=lambda p: f"{p.encoder_inner}")
@pytest.mark.parametrize("network", NETWORKS)
def test_tiles_have_the_same_gradients_under_every_policy(network, policy, small_tiles):
    assert_equal_to_plain(network, policy, "odd", steps=1)


@pytest.mark.parametrize("size", ["odd", "long H"])
@pytest.mark.parametrize("pool", POOLS)
def test_every_pooling_runs_inside_its_block(pool, size, small_tiles):
    factory = instantiate(OmegaConf.load(get_config_dir() / "pool" / f"{pool}.yaml"))
    plain, fused = make_pair(MIXED, pool=factory, activation="leaky_relu", depth=2)
    x, labels = make_batch(SIZES[size])
    assert_equal_results(run_steps(fused, x, labels), run_steps(plain, x, labels))


@pytest.mark.parametrize("network", ["batch", "group, nearest, flat", "residual, strided"])
def test_evaluation_mode_gives_the_same_logits_and_gradients(network, small_tiles):
    plain, fused = make_pair(MIXED, **NETWORKS[network])
    x, labels = make_batch(SIZES["odd"])
    run_steps(plain, x, labels)
    fused.load_state_dict(plain.state_dict())
    with torch.no_grad():
        logits = [model.eval()(x) for model in (fused, plain)]
    torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-9)
    assert_equal_results(run_steps(fused, x, labels), run_steps(plain, x, labels))


@pytest.mark.parametrize("policy", [FUSED, MIXED], ids=["fused", "mixed"])
def test_stochastic_depth_drops_the_same_volumes(policy, small_tiles):
    options = {**NETWORKS["residual, strided by 1 2 3, batch"], "stochastic_depth": 0.5}
    plain, fused = make_pair(policy, **options)
    x, labels = make_batch(SIZES["odd"])
    results = []
    for model in (fused, plain):
        torch.manual_seed(3)
        results.append(run_steps(model, x, labels))
    assert_equal_results(*results)
    torch.manual_seed(4)
    assert fused(x).sum() != fused(x).sum()
    factors = StochasticDepth(0.5).draw(99, x.device)
    assert factors.unique().tolist() == [0, 2]  # the mean stays as it is


@pytest.mark.parametrize("network", ["no norm, wide decoder", "residual, strided"])
@pytest.mark.parametrize(
    "frozen",
    [
        ["encoder", "decoder.0.convs"],
        ["encoder.0", "decoder.1.up"],  # the last skip, and what joins it to the levels below
        ["encoder.0", "encoder.1"],
    ],
)
def test_frozen_parameters_get_no_gradient_and_the_others_the_same(frozen, network, small_tiles):
    networks = make_pair(FUSED, **{**NETWORKS[network], "upsampling": "transposed"})
    x, labels = make_batch(SIZES["odd"])
    for model in networks:
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        DiceCE()(model(x), labels).backward()
    plain, fused = ([p.grad for p in model.parameters()] for model in networks)
    assert [g is None for g in fused] == [g is None for g in plain]
    assert_equal_results(*([g for g in grads if g is not None] for grads in (fused, plain)))


def compute_gradient_error(model, exact, x, labels, autocast):
    """Return the relative error of a model's gradients."""
    with torch.autocast(x.device.type, dtype=autocast, enabled=autocast != torch.float32):
        outputs = model(x)
    DiceCE()(outputs, labels).backward()
    gradients = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    return float((gradients - exact).norm() / exact.norm())


def find_median_error_ratio(device, autocast, network):
    """Return the fused network's gradient error over that of plain modules, for a few inputs."""
    ratios = []
    for seed in range(3):
        plain, fused = (m.to(device) for m in make_pair(MIXED, torch.float32, **NETWORKS[network]))
        reference = copy.deepcopy(plain).double()
        # With 16 voxels, plain modules have a depth of two, and oneDNN's gradient may be NaN.
        x, labels = (t.to(device) for t in make_batch((24, 16, 16), torch.float32))
        x = x + seed
        DiceCE()(reference(x.double()), labels).backward()
        exact = torch.cat([p.grad.flatten() for p in reference.parameters()])
        errors = [compute_gradient_error(m, exact, x, labels, autocast) for m in (fused, plain)]
        ratios.append(errors[0] / errors[1])
    return sorted(ratios)[1]


@pytest.mark.parametrize(
    "network", ["instance, leaky, transposed, supervised", "group, nearest, flat"]
)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(("cpu", dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in DTYPES),
    ],
    ids=str,
)
def test_rounding_errors_are_those_of_plain_modules(network, device, dtype, small_tiles):
    cpu.kernels.library(dtype)
    assert find_median_error_ratio(device, dtype, network) < 1.3


def test_torch_compile_sees_plain_modules():
    plain, fused = make_pair(FUSED, depth=2)
    x, _ = make_batch((8, 8, 8))
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x))


@pytest.mark.parametrize(
    ("kernel", "size"),
    [(3, (2, 8, 8)), (5, (3, 8, 8)), (5, (4, 8, 8)), (5, (8, 1, 8)), (7, (2, 8, 8))],
    ids=str,
)
def test_short_maps_have_bfloat16_weight_gradients_on_a_cpu(kernel, size):
    """The gradient of oneDNN is partly uninitialized memory."""
    x, g = torch.randn(2, 2, 16, *size).bfloat16()
    x = x[:, :4].contiguous(memory_format=torch.channels_last_3d)
    shape, padding = torch.Size([16, 4, *[kernel] * 3]), [kernel // 2] * 3
    for _ in range(20):
        torch.full((16 * 16 * 16 * 27,), torch.inf)  # what uninitialized memory may hold
        gradient = conv_ops.compute_weight_gradient(g, x, shape, padding)
        exact = torch.nn.grad.conv3d_weight(x.double(), shape, g.double(), padding=padding)
        torch.testing.assert_close(gradient.double(), exact, atol=1e-3, rtol=1e-2)


def test_a_plain_pass_of_the_encoder_may_come_before_a_fused_one():
    """Both update the running statistics that batch norm keeps for backward."""
    gradients = []
    for network in make_pair(FUSED, depth=2):
        x, labels = make_batch((8, 8, 8))
        features = x
        for level in network.encoder:
            features = level(features)
            features = features if level.pool is None else level.pool(features)
        loss = DiceCE()(network(x), labels) + features.square().mean()
        loss.backward()
        gradients.append([p.grad for p in network.parameters()])
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)


def test_statistics_that_average_all_batches_are_those_of_plain_modules(small_tiles):
    fused, plain = make_pair(FUSED)
    for module in (*fused.modules(), *plain.modules()):
        if isinstance(module, nn.BatchNorm3d):
            module.momentum = None
    results = [run_steps(model, *make_batch((16, 8, 8)), steps=4) for model in (fused, plain)]
    assert_equal_results(*results)


def test_a_relu_has_no_slope_whatever_attributes_it_has():
    fused, plain = make_pair(FUSED)
    for network in (fused, plain):
        network.encoder[0].convs[0].act.negative_slope = 0.7
    x, _ = make_batch((16, 8, 8))
    torch.testing.assert_close(fused(x), plain(x), rtol=1e-9, atol=1e-11)
