"""Median networks, by the 0-1 principle: what sorts every 0-1 input sorts everything."""

from itertools import product

import pytest

from unet3d.pool.sorting_network import build_median_network


def run(network, values):
    values = list(values)
    for low, high, outputs in network:
        a, b = values[low], values[high]
        if outputs & 1:
            values[low] = min(a, b)
        if outputs & 2:
            values[high] = max(a, b)
    return values


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("wires", [1, 2, 3, 4, 7, 8, 9, 12])
def test_the_median_ends_on_its_wire_for_every_zero_one_input(wires, padded):
    network, middle = build_median_network(wires, padded=padded), (wires - 1) // 2
    for values in product((0, 1), repeat=wires):
        result, expected = run(network, values), sorted(values)
        assert result[middle] == expected[middle]
        if (padded or wires % 2 == 0) and wires > 1:
            assert result[middle + 1] == expected[middle + 1]
