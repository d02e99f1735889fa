"""What is done to the weights of a network: bias of heads, frozen parts."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from unet3d.errors import UsageError
from unet3d.model.weights import (
    compute_sigmoid_bias,
    compute_softmax_bias,
    count_parameters,
    find_head_names,
)
from unet3d.step.build import build_network


def test_an_absent_class_starts_low_but_learnable():
    assert compute_softmax_bias([0.9, 0.1, 0.0])[2] == pytest.approx(np.log(1e-4 / 0.9))
    assert compute_sigmoid_bias([0.0])[0] == pytest.approx(np.log(1e-4), abs=1e-3)
    assert np.isfinite(compute_sigmoid_bias([1.0])[0])


def test_without_labeled_voxels_the_foreground_starts_at_the_default():
    unknown = [float("nan")] * 3
    low = np.log(0.03 / 0.94)
    assert compute_softmax_bias(unknown) == pytest.approx([0, low, low])
    many = torch.tensor(compute_softmax_bias([float("nan")] * 101)).softmax(0)
    assert many[:2].tolist() == pytest.approx([0.5, 0.005])
    assert torch.tensor(compute_sigmoid_bias(unknown[:1])).sigmoid().item() == pytest.approx(0.03)


class TwoHeads(nn.Module):
    """Returns two outputs; an inner layer has as many channels and is not an output."""

    def __init__(self):
        super().__init__()
        self.fine, self.coarse = nn.Conv3d(3, 3, 1), nn.Conv3d(3, 3, 1)
        self.inner = nn.Conv3d(1, 3, 3, padding=1)

    def forward(self, x):
        features = self.inner(x)
        return [self.fine(features), self.coarse(features[..., ::2, ::2, ::2])]


RESIZED = nn.Sequential(nn.Conv3d(1, 3, 1), nn.Conv3d(3, 3, 1), nn.Upsample(scale_factor=2))


@pytest.mark.parametrize(
    ("model", "heads"),
    [(TwoHeads(), ["fine", "coarse"]), (RESIZED, ["1"]), (nn.Conv3d(1, 3, 1, bias=False), [])],
    ids=["two outputs", "a resized output", "no bias"],
)
def test_the_heads_of_a_network_are_its_last_convolutions_with_a_bias(model, heads):
    assert find_head_names(model, torch.zeros(1, 1, 4, 4, 4), 3) == heads


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
    network(torch.randn(2, 1, 16, 16, 16)).sum().backward()
    buffers = dict(network.named_buffers())
    changed = [name for name, buffer in before.items() if not buffers[name].equal(buffer)]
    assert changed
    assert not [name for name in changed if name.startswith(("encoder.0", "decoder"))]
    assert all((p.grad is None) == (not p.requires_grad) for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.grad is not None)
    assert count_parameters(network) == trained
