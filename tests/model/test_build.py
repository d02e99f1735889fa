import copy

import pytest
import torch
from torch import nn

from unet3d.errors import UsageError
from unet3d.memory.step.build import build_network
from unet3d.model.weights import count_parameters


def get_num_outputs(network):
    return {p.shape[0] for name, p in network.named_parameters() if "head" in name}


def test_the_dataset_gives_the_sizes_that_the_settings_leave_open(composed, decathlon_folder):
    settings = composed("data=decathlon", f"data.root={decathlon_folder}", base=[])
    assert settings.data.num_classes is None
    assert get_num_outputs(build_network(settings.step)) == {3}


def test_a_network_without_pooling_refuses_one_that_was_chosen(composed):
    with pytest.raises(UsageError, match=r"^model=dynunet does not use pool=: remove it$"):
        build_network(composed("model=dynunet", "pool=median").step)
    build_network(composed("model=dynunet").step)


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ("[encodr]", r"freeze: the network has no part 'encodr'; it has encoder, decoder, heads"),
        ("['']", r"freeze must be a list of names, got \[''\]"),
        ("[encoder,decoder,heads]", "freeze: nothing is left to train"),
    ],
)
def test_parts_that_cannot_be_frozen_are_refused(composed, freeze, message):
    with pytest.raises(UsageError, match=message):
        build_network(composed(f"freeze={freeze}").step)


def test_frozen_batch_norms_keep_their_statistics(composed):
    network = build_network(composed("freeze=[encoder.0,decoder]", "model.norm=batch").step)
    network = copy.deepcopy(network).train()
    before = {name: b.clone() for name, b in network.named_buffers() if "running" in name}
    x = torch.randn(2, 1, 16, 16, 16)
    network(x).sum().backward()
    changed = {
        name for name, b in network.named_buffers() if name in before and not b.equal(before[name])
    }
    assert changed
    assert not [name for name in changed if name.startswith(("encoder.0", "decoder"))]
    assert all((p.grad is None) == (not p.requires_grad) for p in network.parameters())


def test_frozen_parameters_are_not_counted():
    network = nn.Linear(3, 4)
    assert count_parameters(network) == 16
    network.bias.requires_grad_(False)
    assert count_parameters(network) == 12
