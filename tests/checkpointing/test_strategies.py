"""What strategies of conf/checkpointing recompute, offload and refuse; they change no result.

For fused blocks see tests/model/test_fused.py.
"""

import copy
import pickle
import types

import pytest
import torch
from hydra.utils import instantiate
from monai.networks.nets.dynunet import DynUNet
from omegaconf import OmegaConf
from torch import nn

from unet3d.checkpointing.offload import OffloadActivations
from unet3d.checkpointing.per_level import PerLevelStrategy
from unet3d.checkpointing.recompute import RecomputeBlocks
from unet3d.config.compose import compose_config, get_config_dir
from unet3d.errors import UsageError
from unet3d.memory.fit import estimate_configured_step
from unet3d.model.unet import UNet3D
from unet3d.training.config import parse_train_config

DYNUNET = {
    **{"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "filters": [4, 8, 8]},
    **{"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]},
}


def build_strategy(name):
    return instantiate(OmegaConf.load(get_config_dir() / "checkpointing" / f"{name}.yaml"))


def build_plain_network():
    torch.manual_seed(0)
    network = UNet3D(in_channels=1, num_classes=3, depth=3, width=4, pool=nn.MaxPool3d)
    network.retention = None
    return network.double()


def test_a_strategy_of_fused_blocks_refuses_a_network_without_them_except_fused_and_none():
    layer = nn.Linear(1, 1)
    before = dict(vars(layer))
    for strategy in ("skips", "lean", "leanest"):
        with pytest.raises(UsageError, match=r"Linear has no fused blocks: .*checkpointing=blocks"):
            build_strategy(strategy).apply(layer)
    for strategy in ("none", "fused"):
        build_strategy(strategy).apply(layer)
    assert vars(layer) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_last": ["store_later"]}, "encoder_last must be a list of store, recompute, "),
        ({"encoder_inner": "stream"}, "encoder_inner must be a list"),
        ({"residual_last": []}, "residual_last must be a list"),
        ({"tile_mib": "large"}, "tile_mib must be auto or a number above 0"),
        ({"tile_mib": True}, "tile_mib must be auto or a number above 0"),
        ({"tile_mib": float("inf")}, "tile_mib must be auto or a number above 0"),
        ({"tile_mib": float("nan")}, "tile_mib must be auto or a number above 0"),
    ],
)
def test_unknown_policies_and_sizes_of_tiles_are_refused(options, message):
    with pytest.raises(UsageError, match=rf"^checkpointing\.{message}"):
        PerLevelStrategy(**options)


@pytest.mark.parametrize("levels", [0, [], [True], [7], "0"])
def test_levels_that_are_no_list_of_levels_are_refused(levels):
    with pytest.raises(UsageError, match=r"levels must be all, or within 0\.\."):
        RecomputeBlocks(levels=levels).apply(build_plain_network())


@pytest.mark.parametrize("levels", [[0], [0, 0]])
def test_only_the_given_levels_are_recomputed(levels):
    model = build_plain_network()
    RecomputeBlocks(levels=levels).apply(model)
    recomputed = [level for level, block in model.blocks() if "forward" in vars(block)]
    assert recomputed == [0, 0]


@pytest.mark.parametrize("strategy", [RecomputeBlocks(), OffloadActivations()])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))]
)
def test_a_copied_network_runs_its_own_weights(strategy, duplicate):
    model = build_plain_network()
    strategy.apply(model)
    copied = duplicate(model)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert copied(torch.randn(2, 1, 8, 8, 8, dtype=torch.float64)).abs().max() == 0


def test_recomputed_blocks_have_the_weights_that_functional_call_gives():
    networks, results = [build_plain_network() for _ in range(2)], []
    RecomputeBlocks().apply(networks[1])
    x = torch.randn(1, 1, 16, 16, 16, dtype=torch.float64)
    for network in networks:
        own = [p.clone() for p in network.parameters()]
        weights = {
            k: (p.detach() * 1.1 + 0.05).requires_grad_() for k, p in network.named_parameters()
        }
        loss = torch.func.functional_call(network, weights, (x,)).square().mean()
        results.append(torch.autograd.grad(loss, [*weights.values()]))
        assert all(map(torch.equal, network.parameters(), own))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("strategy", [RecomputeBlocks(), OffloadActivations()])
def test_a_forward_that_was_set_on_a_module_is_kept(strategy):
    network, x = DynUNet(**DYNUNET).eval(), torch.randn(1, 1, 8, 8, 8)
    for module in (network, network.input_block, network.downsamples[0]):
        forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), module)
        module.forward = forward
    expected = network(x)
    for _ in range(2):  # replaces its own forward
        strategy.apply(network)
        torch.testing.assert_close(network(x), expected)
    assert not torch.equal(type(network).forward(network, x), expected)


def test_blocks_recompute_again_for_a_second_backward():
    networks, results = [build_plain_network() for _ in range(2)], []
    RecomputeBlocks().apply(networks[1])
    x = torch.randn(2, 1, 8, 8, 8, dtype=torch.float64)
    for network in networks:
        output = network(x)
        output.mean().backward(retain_graph=True)
        output.square().mean().backward()
        results.append([p.grad for p in network.parameters()])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("changed", ["weight", "input"])
def test_blocks_refuse_what_was_changed_before_backward(changed):
    network, x = build_plain_network(), torch.randn(2, 1, 8, 8, 8, dtype=torch.float64)
    RecomputeBlocks().apply(network)
    loss = network(x).mean()
    with torch.no_grad():
        (next(network.decoder.parameters()) if changed == "weight" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_features_of_an_offloaded_network_are_those_of_its_head():
    network, x = build_plain_network().eval(), torch.randn(1, 1, 8, 8, 8, dtype=torch.float64)
    OffloadActivations().apply(network)
    body, head = network.split_head()
    torch.testing.assert_close(head(body(x)), network(x))


@pytest.mark.parametrize("changed", ["weight", "activation"])
def test_offloading_refuses_what_was_changed_before_backward(changed):
    """Of what stays on the GPU: weights, and tensors below min_mib."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    OffloadActivations().apply(model)
    middle = []
    model[1].register_forward_hook(lambda module, inputs, output: middle.append(output))
    loss = model(torch.randn(2, 4)).sum()
    with torch.no_grad():
        (model[2].weight if changed == "weight" else middle[0]).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_blocks_refuses_a_network_that_does_not_list_its_blocks_and_unknown_levels():
    with pytest.raises(UsageError, match="Linear does not"):
        RecomputeBlocks().apply(nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"0\.\.2"):
        RecomputeBlocks(levels=[3]).apply(build_plain_network())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dynunet model.filters=[32,32,32]", "unet_small model.depth=3"])
def test_offloading_leaves_little_of_any_network_on_a_gpu(model):
    """Between forward and backward, as estimated for a GPU."""

    def estimate_kept_activations(*overrides):
        words = [*f"model={model}".split(), "data.patch_size=[64,64,64]"]
        settings = parse_train_config(compose_config([*words, *overrides], "memory"))
        return estimate_configured_step(settings.step).kinds["saved activations"]

    kept = estimate_kept_activations("checkpointing=none")
    assert estimate_kept_activations("checkpointing=offload") < kept / 3


def test_a_second_strategy_says_which_one_the_network_has():
    model = build_plain_network()
    RecomputeBlocks().apply(model)
    with pytest.raises(UsageError, match=r"^RecomputeBlocks has been applied to this network"):
        PerLevelStrategy().apply(model)


@pytest.mark.slow
def test_a_compiled_network_may_be_recomputed_and_updates_its_statistics_once():
    torch.manual_seed(0)
    plain = DynUNet(**DYNUNET, norm_name="batch")
    recomputed, x = copy.deepcopy(plain), torch.randn(2, 1, 16, 16, 16)
    RecomputeBlocks().apply(recomputed)
    compiled = torch.compile(recomputed, backend="aot_eager")
    for network in (plain, compiled):
        network(x).square().mean().backward()
    others = dict(recomputed.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(others[name].grad, parameter.grad, msg=name)
    buffers = dict(recomputed.named_buffers())
    for name, value in plain.named_buffers():
        torch.testing.assert_close(buffers[name], value, msg=name)
