"""The poolings' twins for export: plain operators, the kernels' values."""

import pytest
import torch
from torch import nn

from tests.pool.helpers.volumes import WINDOWS, volume
from unet3d.pool.approx_median import ApproxMedianPool3d
from unet3d.pool.avg import AvgPool3d
from unet3d.pool.export_modules import MOST_COMPARED, replace_with_plain
from unet3d.pool.max import MaxPool3d
from unet3d.pool.median import MedianPool3d

MORE = {"sorted": ((3, 4, 3), 2, 0), "sorted, padded": ((5, 4, 3), (1, 2, 3), (2, 2, 1))}
KINDS = ("random", "post-ReLU", "tied", "constant", "huge", "subnormal")


def twin(pool: nn.Module) -> nn.Module:
    network = nn.Sequential(pool)
    replace_with_plain(network)
    assert type(network[0]) is not type(pool)
    return network


@pytest.mark.parametrize("window", [*WINDOWS.values(), *MORE.values()], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_kernels(window, kind):
    x = volume((2, 3, 9, 8, 10), kind)
    for pool in (MedianPool3d(*window), MaxPool3d(*window)):
        assert torch.equal(twin(pool)(x), pool(x))
    for pool in (AvgPool3d(*window), ApproxMedianPool3d(*window, tau=0.3)):
        torch.testing.assert_close(twin(pool)(x), pool(x), rtol=1e-5, atol=1e-6)


def test_some_windows_are_compared_and_some_are_sorted():
    sizes = [MedianPool3d(*w).windows for w in MORE.values()]
    assert all(windows.elements > MOST_COMPARED for windows in sizes)


def test_a_traced_pooling_leaves_no_operator_of_ours():
    network = nn.Sequential(nn.Sequential(MedianPool3d(2), MaxPool3d(1)), ApproxMedianPool3d(1))
    replace_with_plain(network)
    program = torch.export.export(network, (torch.zeros(1, 1, 4, 4, 4),))
    assert "unet3d" not in program.graph_module.code
