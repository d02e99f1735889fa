import numpy as np
import pytest
import torch
from torch import nn

from unet3d.model.unet import UNet3D
from unet3d.model.weights import compute_sigmoid_bias, compute_softmax_bias, find_heads, set_bias

FRACTIONS = [0.9, 0.08, 0.02]


def test_an_absent_class_starts_low_but_learnable():
    assert compute_softmax_bias([0.9, 0.1, 0.0])[2] == pytest.approx(np.log(1e-4 / 0.9))
    assert compute_sigmoid_bias([0.0])[0] == pytest.approx(np.log(1e-4), abs=1e-3)
    assert np.isfinite(compute_sigmoid_bias([1.0])[0])


def test_without_labeled_voxels_the_foreground_starts_at_the_default():
    unknown = [float("nan")] * 3
    assert compute_softmax_bias(unknown) == pytest.approx(
        [0, np.log(0.03 / 0.94), np.log(0.03 / 0.94)]
    )
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


def test_the_heads_of_any_network_are_its_output_convolutions():
    assert find_heads(TwoHeads(), torch.zeros(1, 1, 4, 4, 4), 3) == ["fine", "coarse"]


def test_the_head_of_a_network_that_resizes_its_output_is_its_last_convolution():
    model = nn.Sequential(nn.Conv3d(1, 3, 1), nn.Conv3d(3, 3, 1), nn.Upsample(scale_factor=2))
    assert find_heads(model, torch.zeros(1, 1, 4, 4, 4), 3) == ["1"]


def test_a_convolution_without_a_bias_is_not_a_head():
    model = nn.Sequential(nn.Conv3d(1, 3, 1, bias=False))
    assert find_heads(model, torch.zeros(1, 1, 4, 4, 4), 3) == []


def test_output_convolutions_lists_every_head_of_deep_supervision():
    model = UNet3D(in_channels=1, num_classes=3, depth=4, width=2, deep_supervision=True)
    set_bias(model.list_heads(), compute_softmax_bias(FRACTIONS))
    assert len(model.heads) == 2
    for head in model.heads:
        assert head.bias.softmax(0).tolist() == pytest.approx(FRACTIONS)
