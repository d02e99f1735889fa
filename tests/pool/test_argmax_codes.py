"""Codes of selected indices, for every window."""

import pytest
import torch

from tests.pool.helpers.volumes import WINDOWS
from unet3d.pool.argmax_codes import IndexCode, choose_code, decode, encode
from unet3d.pool.reference import maximum, median
from unet3d.pool.windows import PoolWindows


@pytest.mark.parametrize("name", ["median", "max"])
@pytest.mark.parametrize("window", [*WINDOWS.values(), (4, 4, 2), ((5, 5, 1), 2, (2, 2, 0))])
def test_decoding_returns_the_encoded_indices(name, window):
    windows, x = PoolWindows.from_args(*window), torch.randn(2, 3, 9, 10, 7)
    indices = {"median": median, "max": maximum}[name](x, windows)[1]
    code = choose_code(name, windows)
    decoded = decode(encode(indices, code, windows, x.shape), code, windows, x.shape)
    assert torch.equal(torch.minimum(*decoded), torch.minimum(*indices))
    assert torch.equal(torch.maximum(*decoded), torch.maximum(*indices))


@pytest.mark.parametrize(
    ("window", "code"),
    [
        ((2, None, 0), IndexCode.MASK),
        ((3, 2, 0), IndexCode.PAIR),
        ((3, 2, 1), IndexCode.PAIR),
        ((5, 5, 0), IndexCode.PAIR),
        (((4, 2, 2), None, 0), IndexCode.PAIR),
        ((4, None, 0), IndexCode.TWO),
    ],
)
def test_each_window_has_the_most_compact_code(window, code):
    assert choose_code("median", PoolWindows.from_args(*window)) == code
