"""Poolings of any network are replaced by ours."""

import pytest
import torch
from torch import nn

import unet3d
from unet3d.errors import UsageError
from unet3d.pool.max import MaxPool3d
from unet3d.pool.median import MedianPool3d


def test_a_pooling_that_is_used_twice_stays_one_layer():
    pool = nn.MaxPool3d(2)
    network = nn.Sequential(pool, nn.Identity(), pool)
    assert unet3d.replace_pooling(network) == 1
    assert network[0] is network[2]
    assert type(network[0]) is MaxPool3d


@pytest.mark.parametrize("pool", [nn.MaxPool3d(2), MedianPool3d(2)])
def test_a_pooling_itself_cannot_be_replaced_in_place(pool):
    with pytest.raises(UsageError, match=r"Pool3d is itself a pooling.*unet3d\.MedianPool3d\(2\)"):
        unet3d.replace_pooling(pool, "avg")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
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
        unet3d.replace_pooling(nn.Sequential(nn.MaxPool3d(2)), "x")


class Negated(nn.MaxPool3d):
    def forward(self, x):
        return -super().forward(-x)


@pytest.mark.parametrize("change", ["subclass", "hook", "forward"])
def test_a_pooling_that_computes_something_else_is_refused_and_no_other_is_replaced(change):
    layer = Negated(2) if change == "subclass" else nn.MaxPool3d(2)
    if change == "hook":
        layer.register_forward_hook(lambda module, args, output: 2 * output)
    elif change == "forward":
        layer.forward = torch.sin
    network = nn.Sequential(nn.MaxPool3d(2), layer).eval()
    with pytest.raises(UsageError, match=r"^1: a pooling with a hook or its own forward"):
        unet3d.replace_pooling(network)
    assert type(network[0]) is nn.MaxPool3d
    network[1] = nn.AvgPool3d(2).eval()
    assert unet3d.replace_pooling(network) == 2
    assert not any(module.training for module in network)
