"""Every strategy of conf/checkpointing leaves loss, gradients, buffers and names as they are."""

import copy

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from unet3d.build.objects import conf_folder
from unet3d.checkpointing.blocks import RecomputeBlocks
from unet3d.model.unet import UNet3D
from unet3d.types import Misuse

OPTIONS = sorted((conf_folder() / "checkpointing").glob("*.yaml"))


def network(norm="batch"):
    torch.manual_seed(0)
    return UNet3D(in_channels=1, num_classes=3, depth=3, width=4, norm=norm, pool=nn.MaxPool3d)


def steps(model, count=2):
    """Train a little; return losses, gradients and the state dict."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for n in range(count):
        x = torch.randn(2, 1, 9, 8, 10, generator=torch.Generator().manual_seed(n))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters()], model.state_dict()


@pytest.mark.parametrize("option", OPTIONS, ids=lambda path: path.stem)
@pytest.mark.parametrize("norm", ["batch", "instance", "group"])
def test_loss_gradients_and_every_buffer_are_equal_bit_for_bit(option, norm):
    plain, cheaper = network(norm), network(norm)
    instantiate(OmegaConf.load(option)).apply(cheaper)
    (losses, gradients, state), (losses2, gradients2, state2) = steps(plain), steps(cheaper)
    assert all(a.equal(b) for a, b in zip(losses, losses2, strict=True))
    assert all(a.equal(b) for a, b in zip(gradients, gradients2, strict=True))
    assert list(state) == list(state2)
    assert all(state[name].equal(state2[name]) for name in state)


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
            loss = model(torch.randn(2, 1, 16, 16, 16)).sum()
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
    assert twin(torch.randn(2, 1, 8, 8, 8)).abs().max() == 0


def test_a_network_without_blocks_is_refused():
    with pytest.raises(Misuse, match="Linear does not"):
        RecomputeBlocks().apply(nn.Linear(1, 1))


def test_a_level_that_the_network_does_not_have_is_refused():
    with pytest.raises(Misuse, match=r"0\.\.2"):
        RecomputeBlocks(levels=[3]).apply(network())
