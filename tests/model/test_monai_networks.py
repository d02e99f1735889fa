"""Networks of MONAI: each file of conf/model trains, recomputes its blocks, and has a head."""

import pytest
import torch
from monai.networks.nets.mednext import create_mednext

from tests.config.helpers.configs import SHRUNK
from unet3d.checkpointing.offload import OffloadActivations
from unet3d.checkpointing.recompute import MONAI_BLOCKS, RecomputeBlocks, find_blocks
from unet3d.commands.train import build_training
from unet3d.config.compose import get_config_dir
from unet3d.errors import UsageError
from unet3d.loss.overlap import DiceCE
from unet3d.model.weights import find_head_names
from unet3d.step.build import build_network

NETWORKS = sorted(
    path.stem
    for path in (get_config_dir() / "model").glob("*.yaml")
    if "_target_: monai." in path.read_text()
)
MARKS = {"swin_unetr": pytest.mark.long, "dynunet": (), "segresnet": ()}
DEEP = {
    "dynunet": [
        *("+model.deep_supervision=true", "+model.deep_supr_num=2", "model.filters=[4,8,8,8]"),
        *("model.kernel_size=[3,3,3,3]", "model.strides=[1,2,2,2]"),
        "model.upsample_kernel_size=[2,2,2]",
    ],
    "mednext": ["model.deep_supervision=true"],
    "segresnet_ds": ["model.dsdepth=3"],
}


def train_two_steps(model, size):
    optimizer, results = torch.optim.SGD(model.parameters(), 0.05), []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 1, *size, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 4, (2, *size), generator=generator, dtype=torch.uint8)
        optimizer.zero_grad()
        loss = DiceCE()(model(x), labels)
        loss.backward()
        optimizer.step()
        results += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [*results, *model.state_dict().values()]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=MARKS.get(n, pytest.mark.slow)) for n in NETWORKS]
)
def test_blocks_and_offload_change_no_bit_of_loss_gradients_and_buffers(composed, name):
    results = []
    for strategy in (None, RecomputeBlocks(), OffloadActivations(min_mib=0)):
        torch.manual_seed(0)
        settings = composed(f"model={name}", *SHRUNK[name], *DEEP.get(name, []))
        model = build_network(settings.step).double().train()
        if strategy is not None:
            strategy.apply(model)
        torch.manual_seed(1)  # stochastic depth
        results.append(train_two_steps(model, settings.data.patch_size))
    plain, *others = results
    assert len(plain) > 20
    for other in others:
        assert all(a.equal(b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_hold_most_parameters_of_a_network_and_its_heads_are_found(composed, name):
    settings = composed(f"model={name}", *SHRUNK[name])
    model = build_network(settings.step)
    blocks = [block for _, block in find_blocks(model)]
    assert len({id(block) for block in blocks}) == len(blocks)
    assert {type(block).__name__ for block in blocks} <= set(MONAI_BLOCKS)
    inside = sum(p.numel() for block in blocks for p in block.parameters())
    assert inside > 0.5 * sum(p.numel() for p in model.parameters())
    assert find_head_names(model.eval(), torch.zeros(1, 1, *settings.data.patch_size), 4)


@pytest.mark.parametrize("kernel_size", [3, 5])
@pytest.mark.parametrize("variant", "sbml")
def test_mednext_has_the_layers_of_the_published_variant(composed, variant, kernel_size):
    words = f"model=mednext_{variant}", f"model.kernel_size={kernel_size}"
    sizes = {"in_channels": 1, "out_channels": 4, "kernel_size": kernel_size}
    with torch.device("meta"):
        ours = build_network(composed(*words).step)
        published = create_mednext(variant, **sizes)
    assert str(ours).replace("DepthwiseConv", "Conv") == str(published)
    adds = [[getattr(m, "do_res", None) for m in net.modules()] for net in (ours, published)]
    assert adds[0] == adds[1]


def test_a_patch_that_a_network_cannot_take_is_named(composed, tmp_path):
    settings = composed("model=dynunet", "data.patch_size=[15,16,16]")
    with pytest.raises(UsageError, match=r"^model=dynunet cannot take patches of 15x16x16: "):
        build_training(settings, tmp_path)
