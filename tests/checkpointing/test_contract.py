"""Every strategy of conf/checkpointing leaves loss, gradients, buffers and names as they are.

The judge is the network of plain modules, in float64 through two steps of the optimizer: in float32
a flipped ReLU or pooling choice moves the plain network as much (see tests/model/test_lean.py).
"""

import copy

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from unet3d.checkpointing.offload import OffloadActivations
from unet3d.checkpointing.per_level import PerLevelPolicy
from unet3d.checkpointing.recompute import RecomputeBlocks
from unet3d.config.compose import compose_config, get_config_dir
from unet3d.errors import UsageError
from unet3d.model.lean import host_offload, tiling
from unet3d.model.unet import UNet3D
from unet3d.workflows.memory.estimate import estimate_memory

OPTIONS = [
    path
    for path in sorted((get_config_dir() / "checkpointing").glob("*.yaml"))
    if path.stem != "auto"  # which stands for one of the others
]


def network(norm="batch", **choices):
    """Plain modules, until a strategy says otherwise."""
    torch.manual_seed(0)
    made = UNet3D(
        in_channels=1, num_classes=3, depth=3, width=4, norm=norm, pool=nn.MaxPool3d, **choices
    )
    made.keep = None
    return made.double()


def steps(model, count=2):
    """Train a little; return losses, gradients and the state dict."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for n in range(count):
        generator = torch.Generator().manual_seed(n)
        x = torch.randn(2, 1, 25, 8, 10, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters()], model.state_dict()


@pytest.mark.parametrize("option", OPTIONS, ids=lambda path: path.stem)
@pytest.mark.parametrize("norm", ["batch", "instance", "group", "none"])
@pytest.mark.parametrize("slab_bytes", [1 << 10, 1 << 24], ids=["slabs", "one"])
def test_loss_gradients_and_every_buffer_are_equal(option, norm, slab_bytes, monkeypatch):
    monkeypatch.setattr(tiling, "SLAB_BYTES", slab_bytes)
    plain, cheaper = network(norm), network(norm)
    instantiate(OmegaConf.load(option)).apply(cheaper)
    (losses, gradients, state), (losses2, gradients2, state2) = steps(plain), steps(cheaper)
    scale = max(g.abs().max() for g in gradients)
    for a, b in zip([*losses, *gradients], [*losses2, *gradients2], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-13 * float(1 + scale))
    assert list(state) == list(state2)
    for name, value in state.items():
        torch.testing.assert_close(state2[name], value, rtol=1e-10, atol=1e-12)


def test_recomputed_blocks_are_equal_bit_for_bit():
    plain, cheaper = network(), network()
    RecomputeBlocks().apply(cheaper)
    (losses, gradients, state), (losses2, gradients2, state2) = steps(plain), steps(cheaper)
    assert all(a.equal(b) for a, b in zip(losses, losses2, strict=True))
    assert all(a.equal(b) for a, b in zip(gradients, gradients2, strict=True))
    assert all(state[name].equal(state2[name]) for name in state)


@pytest.mark.parametrize("option", ["skips", "lean", "leanest"])
def test_a_rung_is_refused_where_there_are_no_lean_blocks(option):
    strategy = instantiate(OmegaConf.load(get_config_dir() / "checkpointing" / f"{option}.yaml"))
    with pytest.raises(UsageError, match="checkpointing=blocks or none"):
        strategy.apply(nn.Linear(1, 1))


def test_an_unknown_word_of_a_level_is_refused():
    with pytest.raises(UsageError, match="all, last, host, again, slabs, never"):
        PerLevelPolicy(encoders=["some"], decoders=["store_all"])


def test_running_statistics_would_move_twice_without_setting_buffers_aside():
    """The trap that the contract guards against is real (pytorch#96136)."""
    plain, careless = network(), network()
    for _, block in careless.blocks():
        inner = type(block).forward

        def forward(*inputs, block=block, inner=inner):
            return torch.utils.checkpoint.checkpoint(inner, block, *inputs, use_reentrant=False)

        block.forward = forward
    _, _, state = steps(plain, 1)
    _, _, moved = steps(careless, 1)
    assert moved["encoder.0.convs.0.norm.num_batches_tracked"] == 2
    assert not state["encoder.0.convs.0.norm.running_mean"].equal(
        moved["encoder.0.convs.0.norm.running_mean"]
    )


def test_blocks_keep_less_for_backward():
    def saved_bytes(model):
        seen = {}

        def pack(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(torch.randn(2, 1, 16, 16, 16, dtype=torch.float64)).sum()
        kept = sum(seen.values())
        loss.backward()
        return kept

    plain, cheaper = network(), network()
    RecomputeBlocks().apply(cheaper)
    assert saved_bytes(cheaper) < 0.5 * saved_bytes(plain)


def test_levels_choose_which_blocks_are_redone():
    model = network()
    RecomputeBlocks(levels=[0]).apply(model)
    redone = [level for level, block in model.blocks() if "forward" in vars(block)]
    assert redone == [0, 0]


def test_a_copied_network_redoes_its_own_blocks():
    model = network()
    RecomputeBlocks().apply(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert twin(torch.randn(2, 1, 8, 8, 8, dtype=torch.float64)).abs().max() == 0


def test_a_network_without_blocks_is_refused():
    with pytest.raises(UsageError, match="Linear does not"):
        RecomputeBlocks().apply(nn.Linear(1, 1))


def test_a_level_that_the_network_does_not_have_is_refused():
    with pytest.raises(UsageError, match=r"0\.\.2"):
        RecomputeBlocks(levels=[3]).apply(network())


def test_any_other_network_offloads_its_saved_tensors_and_stays_equal_bit_for_bit():
    def sequence():
        torch.manual_seed(0)
        layers = [nn.Conv3d(1, 4, 3), nn.InstanceNorm3d(4), nn.LeakyReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Conv3d(4, 4, 3), nn.BatchNorm3d(4), nn.ReLU()).double()

    plain, cheaper = sequence(), sequence()
    OffloadActivations(["offload"], ["store_all"], least_mib=0).apply(cheaper)
    (losses, gradients, state), (losses2, gradients2, state2) = steps(plain), steps(cheaper)
    assert all(a.equal(b) for a, b in zip(losses, losses2, strict=True))
    assert all(a.equal(b) for a, b in zip(gradients, gradients2, strict=True))
    assert all(state[name].equal(state2[name]) for name in state)


def test_offloading_keeps_little_on_a_gpu_in_any_network():
    """Between forward and backward, as a meter that imitates a GPU counts it."""

    def kept(options):
        words = ["model=dynunet", "model.filters=[32,32,32]", "data.patch_size=[64,64,64]"]
        return estimate_memory(compose_config([*words, *options], "memory")).kinds[
            "activations kept"
        ]

    assert kept(["checkpointing=offload"]) < kept([]) / 3


def test_a_map_in_the_host_gives_any_of_its_rows(monkeypatch):
    monkeypatch.setattr(host_offload, "CHUNK_BYTES", 1000)
    for axis in (2, 3):
        space = tiling.MapLayout(2, (13, 12, 5), axis, torch.float32, torch.device("cpu"))
        x = space.empty(3).normal_()
        there = host_offload.HostMap(x, space)
        for start, stop in ((0, 4), (2, 9), (8, space.rows), (0, space.rows), (5, 6)):
            assert there.rows(start, stop).equal(space.narrow_rows(x, start, stop))
