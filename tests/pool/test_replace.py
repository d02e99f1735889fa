"""Poolings of any network are replaced by ours."""

import copy

import pytest
import torch
from monai.networks.nets.basic_unet import BasicUNet
from torch import nn

import unet3d
from unet3d.errors import UsageError
from unet3d.pool.approx_median import ApproxMedianPool3d
from unet3d.pool.avg import AvgPool3d
from unet3d.pool.max import MaxPool3d
from unet3d.pool.median import MedianPool3d


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1),
        nn.Sequential(nn.MaxPool3d(3, 2, 1), nn.AvgPool3d((2, 2, 1), padding=(1, 1, 0))),
        nn.AvgPool3d(2),
    )


def compute(network):
    torch.manual_seed(1)
    x = torch.randn(2, 1, 16, 16, 16, requires_grad=True)
    output = network(x)
    output.square().sum().backward()
    return output, x.grad, network[0].weight.grad


def test_the_same_poolings_have_equal_outputs_and_gradients():
    network = make_network()
    replaced = copy.deepcopy(network)
    assert unet3d.replace_pooling(replaced) == 3
    assert [type(m) for m in (*replaced[1], replaced[2])] == [MaxPool3d, AvgPool3d, AvgPool3d]
    for ours, theirs in zip(compute(replaced), compute(network), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("pool", "kind"),
    [
        ("median", MedianPool3d),
        ("approx_median", ApproxMedianPool3d),
        ("max", MaxPool3d),
        (MedianPool3d, MedianPool3d),
    ],
)
def test_all_poolings_become_another(pool, kind):
    network = make_network()
    assert unet3d.replace_pooling(network, pool) == 3
    assert [type(m) for m in (*network[1], network[2])] == [kind] * 3


def test_our_own_poolings_are_replaced_too():
    network = unet3d.UNet3D(in_channels=1, num_classes=2, depth=3, width=4, pool_kernel=(1, 2, 2))
    assert unet3d.replace_pooling(network, "median") == 2
    assert str(network.encoder[0].pool) == str(MedianPool3d((1, 2, 2)))
    expected = unet3d.UNet3D(
        in_channels=1, num_classes=2, depth=3, width=4, pool_kernel=(1, 2, 2), pool="median"
    )
    expected.load_state_dict(network.state_dict())
    x = torch.randn(2, 1, 4, 16, 16)
    assert network(x).equal(expected(x))


def test_a_pooling_that_is_used_twice_stays_one_layer():
    pool = nn.MaxPool3d(2)
    network = nn.Sequential(pool, nn.Identity(), pool)
    assert unet3d.replace_pooling(network) == 1
    assert network[0] is network[2]
    assert type(network[0]) is MaxPool3d


@pytest.mark.parametrize(
    "network", [nn.Conv3d(1, 1, 3), nn.Sequential(nn.MaxPool2d(2)), nn.Sequential(MaxPool3d(2))]
)
def test_nothing_to_replace_is_a_warning(network):
    with pytest.warns(UserWarning, match="has no 3D pooling to replace"):
        assert unet3d.replace_pooling(network) == 0


@pytest.mark.parametrize("pool", [nn.MaxPool3d(2), MedianPool3d(2)])
def test_a_pooling_itself_cannot_be_replaced_in_place(pool):
    with pytest.raises(UsageError, match=r"Pool3d is itself a pooling.*unet3d\.MedianPool3d\(2\)"):
        unet3d.replace_pooling(pool, "avg")


def test_the_poolings_of_monais_networks_are_found_and_need_less_memory():
    network = BasicUNet(3, 1, 2, features=(4, 4, 8, 8, 8, 4))
    shape = (1, 1, 32, 32, 32)
    before = unet3d.estimate_memory(network, shape, device="cpu").peak
    assert unet3d.replace_pooling(network) == 4
    assert not any(isinstance(module, nn.MaxPool3d) for module in network.modules())
    assert unet3d.estimate_memory(network, shape, device="cpu").peak < before
    assert network(torch.zeros(shape)).shape == (1, 2, 32, 32, 32)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.MaxPool3d(2, ceil_mode=True), "1.0: a pooling with ceil_mode=True"),
        (nn.MaxPool3d(2, dilation=2), "1.0: a pooling with dilation=2"),
        (nn.MaxPool3d(2, return_indices=True), "1.0: a pooling with return_indices=True"),
        (nn.AvgPool3d(2, divisor_override=3), "1.0: a pooling with divisor_override=3"),
        (nn.AvgPool3d(3, 2, 1, count_include_pad=False), "1.0: .* count_include_pad=False"),
    ],
)
def test_a_pooling_of_another_kind_is_named(layer, message):
    network = nn.Sequential(nn.Identity(), nn.Sequential(layer))
    with pytest.raises(UsageError, match=message):
        unet3d.replace_pooling(network)


def test_an_unknown_pooling_is_named():
    with pytest.raises(UsageError, match="must be one of max, avg, median, approx_median, got 'x'"):
        unet3d.replace_pooling(make_network(), "x")
