import numpy as np
import pytest
import torch
from monai.networks import nets
from torch import nn

from unet3d.model.prior_bias import find_heads, set_bias, sigmoid_bias, softmax_bias
from unet3d.model.unet import UNet3D

SHARES = [0.9, 0.08, 0.02]


def test_with_equal_features_the_first_probabilities_are_the_class_shares():
    head = nn.Conv3d(4, 3, 1)
    set_bias([head], softmax_bias(SHARES))
    p = head(torch.zeros(1, 4, 2, 2, 2)).softmax(1)
    assert p[0, :, 0, 0, 0].tolist() == pytest.approx(SHARES)


def test_a_region_begins_at_its_own_share():
    assert torch.tensor(sigmoid_bias([0.3, 0.001])).sigmoid().tolist() == pytest.approx(
        [0.3, 0.001]
    )


def test_a_class_that_was_not_seen_begins_low_but_where_it_can_be_learned():
    assert softmax_bias([0.9, 0.1, 0.0])[2] == pytest.approx(np.log(1e-4 / 0.9))
    assert sigmoid_bias([0.0])[0] == pytest.approx(np.log(1e-4), abs=1e-3)
    assert np.isfinite(sigmoid_bias([1.0])[0])


def test_without_labeled_voxels_the_foreground_begins_as_usual():
    nothing = [float("nan")] * 3
    assert softmax_bias(nothing) == pytest.approx([0, np.log(0.03 / 0.94), np.log(0.03 / 0.94)])
    assert torch.tensor(sigmoid_bias(nothing[:1])).sigmoid().item() == pytest.approx(0.03)


class TwoHeads(nn.Module):
    """Gives two outputs, of which a layer with as many channels is none."""

    def __init__(self):
        super().__init__()
        self.fine, self.coarse = nn.Conv3d(3, 3, 1), nn.Conv3d(3, 3, 1)
        self.inner = nn.Conv3d(1, 3, 3, padding=1)

    def forward(self, x):
        features = self.inner(x)
        return [self.fine(features), self.coarse(features[..., ::2, ::2, ::2])]


def test_the_heads_of_an_unknown_network_are_the_convolutions_that_give_its_outputs():
    assert find_heads(TwoHeads(), torch.zeros(1, 1, 4, 4, 4), 3) == ["fine", "coarse"]


def test_where_outputs_are_resized_the_last_convolution_of_that_width_is_the_head():
    model = nn.Sequential(nn.Conv3d(1, 3, 1), nn.Conv3d(3, 3, 1), nn.Upsample(scale_factor=2))
    assert find_heads(model, torch.zeros(1, 1, 4, 4, 4), 3) == ["1"]


def test_a_network_whose_last_convolution_has_no_bias_has_no_head():
    model = nn.Sequential(nn.Conv3d(1, 3, 1, bias=False))
    assert find_heads(model, torch.zeros(1, 1, 4, 4, 4), 3) == []


def test_every_head_of_deep_supervision_is_named_by_the_network():
    model = UNet3D(
        in_channels=1,
        num_classes=3,
        depth=4,
        width=2,
        deep_supervision=True,
        pool=nn.MaxPool3d,
    )
    set_bias(model.output_convolutions(), softmax_bias(SHARES))
    assert len(model.heads) == 2
    for head in model.heads:
        assert head.bias.softmax(0).tolist() == pytest.approx(SHARES)


@pytest.mark.parametrize(
    ("network", "head"),
    [
        ("SegResNet(3, 8, 1, 3)", "conv_final.2.conv"),
        ("BasicUNet(3, 1, 3, (2, 2, 2, 2, 2, 2))", "final_conv"),
        ("AttentionUnet(3, 1, 3, (2, 4), (2,))", "model.2.conv"),
        ("UNet(3, 1, 3, (2, 4), (2,))", "model.2.conv"),
    ],
)
def test_the_heads_of_monai_s_networks_are_found(network, head):
    model = eval(network, vars(nets))
    assert find_heads(model, torch.zeros(1, 1, 32, 32, 32), 3) == [head]
