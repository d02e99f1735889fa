"""MedNeXt's blocks that store their input: equal to MONAI's, by tile and by kind of block."""

import copy
import types
import warnings

import pytest
import torch
from monai.data import MetaTensor
from monai.networks.blocks.mednext_block import MedNeXtBlock
from monai.networks.nets.mednext import create_mednext
from torch import nn

from tests.config.helpers.configs import SHRUNK
from unet3d.checkpointing.mednext import is_mednext_block
from unet3d.checkpointing.per_level import PerLevelStrategy, PlainModules
from unet3d.errors import UsageError
from unet3d.loss.overlap import DiceCE
from unet3d.memory.fit import list_strategies
from unet3d.model.weights import find_head_names
from unet3d.step.build import build_network

LEAN = PerLevelStrategy(encoder_last=["recompute_tiled", "store"], tile_mib=0.01)
STRATEGIES = {"fused": PerLevelStrategy(), "tiles": PerLevelStrategy(tile_mib=0.01), "lean": LEAN}


def build_float64(composed, *words):
    """Return a MedNeXt in training with norms that are not the identity."""
    torch.manual_seed(0)
    network = build_network(composed("model=mednext", *SHRUNK["mednext"], *words).step).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network.train()


def train_two_steps(network):
    optimizer, results = torch.optim.SGD(network.parameters(), 0.05), []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 1, 32, 32, 32, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 4, (2, 32, 32, 32), generator=generator, dtype=torch.uint8)
        optimizer.zero_grad()
        loss = DiceCE()(network(x), labels)
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in network.parameters())]
        optimizer.step()
    return [*results, *network.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("kernel_size", [3, 5])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_steps_have_the_loss_and_the_gradients_of_plain_modules(
    composed, strategy, kernel_size
):
    words = f"model.kernel_size={kernel_size}", "model.deep_supervision=true"
    plain, fused = (build_float64(composed, *words) for _ in range(2))
    PlainModules().apply(plain)
    STRATEGIES[strategy].apply(fused)
    for got, expected in zip(train_two_steps(fused), train_two_steps(plain), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


def test_a_block_saves_its_input_and_what_is_small(composed):
    network = build_float64(composed)
    STRATEGIES["fused"].apply(network)
    block = network.enc_stages[0][0]
    saved, x = [], torch.randn(1, 4, 16, 16, 16, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        block(x)
    assert [t.data_ptr() for t in saved if t.numel() >= x.numel()] == [x.data_ptr()]


def test_a_network_without_residual_connections_and_frozen_weights_keep_their_gradients(composed):
    word = "model.use_residual_connection=false"
    networks = [build_float64(composed, word) for _ in range(2)]
    STRATEGIES["tiles"].apply(networks[1])
    gradients = []
    for network in networks:
        network.enc_stages.requires_grad_(False)
        network(torch.ones(1, 1, 32, 32, 32, dtype=torch.float64)).pow(2).mean().backward()
        gradients.append([p.grad for p in network.parameters()])
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


def test_backward_within_autocast_computes_in_the_types_of_forward(composed):
    plain = build_float64(composed).float()
    x, gradients = torch.randn(1, 1, 32, 32, 32), []
    for network in (plain, copy.deepcopy(plain)):
        if network is not plain:
            STRATEGIES["fused"].apply(network)
        loss = network(x).square().mean()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    assert (gradients[1] - gradients[0]).norm() < 1e-4 * gradients[0].norm()


@pytest.mark.parametrize("residual", [False, True])
def test_a_metatensor_keeps_its_metadata(composed, residual):
    network = build_float64(composed, f"model.use_residual_connection={residual}").float()
    STRATEGIES["fused"].apply(network)
    affine = torch.diag(torch.tensor([2.0, 3.0, 4.0, 1.0]))
    y = network(MetaTensor(torch.randn(1, 1, 32, 32, 32), affine=affine))
    assert torch.equal(y.affine, affine.to(y.affine))


def test_mixed_precision_computes_in_half_and_keeps_gradients_in_full(composed):
    network = build_float64(composed).float()
    STRATEGIES["fused"].apply(network)
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(torch.randn(1, 1, 32, 32, 32))
    logits.float().pow(2).mean().backward()
    assert logits.dtype == torch.bfloat16
    assert {p.grad.dtype for p in network.parameters()} == {torch.float32}


def test_gradients_of_maps_shorter_than_a_kernel_are_right():
    torch.manual_seed(0)
    network = create_mednext("S", 3, 1, 2, kernel_size=5)
    network = network.enc_stages[0][:1]
    plain, x = copy.deepcopy(network), torch.randn(1, 32, 4, 4, 4)
    PerLevelStrategy().apply(network)
    gradients = []
    for model, layout in ((plain, torch.contiguous_format), (network, torch.channels_last_3d)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x.contiguous(memory_format=layout)).float().square().mean()
        for n in range(8, 22, 2):  # torch must not read what it finds in free memory
            tensors = [torch.full((2**n,), torch.nan) for _ in range(8)]
            del tensors
        loss.backward()
        gradients.append(model[0].conv1.weight.grad)
    assert (gradients[0] - gradients[1]).norm() < 0.05 * gradients[0].norm()


def test_weights_of_monai_load_and_names_stay(composed):
    network = build_network(composed("model=mednext_s").step)
    PerLevelStrategy().apply(network)
    network.load_state_dict(create_mednext("S", out_channels=4).state_dict())


def test_other_blocks_stay_as_they_are():
    layers = create_mednext("S"), create_mednext("S", spatial_dims=2)
    assert [any(map(is_mednext_block, network.modules())) for network in layers] == [True, False]
    layers[0].enc_stages[0][0].global_resp_norm = True
    assert not is_mednext_block(layers[0].enc_stages[0][0])


class Wrapped(nn.Conv3d):
    """An adapter with the attributes of the convolution that it wraps."""

    def forward(self, x):
        return super().forward(x) * 2


def replace_norm(block):
    block.norm = nn.InstanceNorm3d(block.norm.num_channels, affine=True)


def double_output(module, given, output):
    return output * 2


CHANGES = {
    "activation": lambda block: setattr(block, "act", nn.ReLU6()),
    "adapter": lambda block: setattr(block.conv2, "__class__", Wrapped),
    "sequence": lambda block: setattr(block, "conv3", nn.Sequential(block.conv3)),
    "norm": replace_norm,
    "hook": lambda block: block.conv3.register_forward_hook(double_output),
    "hook of the norm": lambda block: block.norm.register_full_backward_hook(
        lambda module, given, output: (given[0] * 2,)
    ),
    "parametrization": lambda block: nn.utils.parametrizations.weight_norm(block.conv1),
}


def build_blocks():
    """Return a plain block and a fused one, with random weights."""
    torch.manual_seed(0)
    plain = nn.Sequential(MedNeXtBlock(4, 4, expansion_ratio=2, kernel_size=3)).double()
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    fused = copy.deepcopy(plain)
    STRATEGIES["tiles"].apply(fused)
    return plain, fused


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_was_changed_runs_as_it_is_and_says_so(change):
    x, results = torch.randn(2, 4, 6, 7, 8, dtype=torch.float64), []
    for network in build_blocks():
        CHANGES[change](network[0])
        network.double()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = network(x).pow(2).mean()
        said = [str(w.message) for w in caught]
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in network.parameters())])
    assert len(said) == 1
    assert "it runs as MONAI's module" in said[0]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_a_block_keeps_a_forward_that_was_set_on_it():
    block, _ = build_blocks()
    forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), block[0])
    block[0].forward = forward
    x = torch.randn(2, 4, 6, 7, 8, dtype=torch.float64)
    expected = block(x)
    STRATEGIES["tiles"].apply(block)
    with pytest.warns(UserWarning, match="MedNeXtBlock has another forward"):
        torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("learning", ["", "conv2"])
def test_gradients_are_of_the_weights_that_functional_call_gives(learning):
    x, results = torch.randn(2, 4, 6, 7, 8, dtype=torch.float64), []
    for network in build_blocks():
        weights = {
            name: (p.detach() * 1.1 + 0.05).requires_grad_(learning in name)
            for name, p in network.named_parameters()
        }
        loss = torch.func.functional_call(network, weights, (x,)).pow(2).mean()
        results.append(torch.autograd.grad(loss, [w for w in weights.values() if w.requires_grad]))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_a_hook_on_a_weight_sees_its_gradient_once():
    x, gradients = torch.randn(2, 4, 6, 7, 8, dtype=torch.float64), []
    for network in build_blocks():
        for parameter in network.parameters():
            parameter.register_hook(lambda grad: -0.5 * grad)
        network(x).pow(2).mean().backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_a_second_derivative_is_refused_with_what_to_do():
    _, fused = build_blocks()
    loss = fused(torch.randn(1, 4, 6, 7, 8, dtype=torch.float64)).sum()
    with pytest.raises(RuntimeError, match=r"no second derivative: .*, or set checkpointing=none"):
        torch.autograd.grad(loss, [*fused.parameters()], create_graph=True)


def test_the_search_for_its_heads_warns_of_no_hooks(composed):
    words = *SHRUNK["mednext"], "model.init_filters=4"  # as many as classes
    network = build_network(composed("model=mednext", *words).step)
    PerLevelStrategy().apply(network)
    assert find_head_names(network, torch.randn(1, 1, 32, 32, 32), 4)


def test_a_patch_whose_coarsest_map_is_one_voxel_is_refused(composed):
    network = build_float64(composed)
    PerLevelStrategy().apply(network)
    with pytest.raises(UsageError, match="set 32 or more voxels along each axis"):
        network(torch.randn(2, 1, 16, 16, 16, dtype=torch.float64))


def test_auto_has_strategies_for_it(composed):
    assert list_strategies(composed("model=mednext").step) == ("none", "fused", "lean")
