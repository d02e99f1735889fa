import pytest

from unet3d.data.sizes import parse_size, parse_spacing
from unet3d.errors import UsageError


def test_sizes_and_spacings_become_tuples():
    assert parse_size("data.patch_size", [8, 9, 10]) == (8, 9, 10)
    assert parse_spacing("data.spacing_mm", [1, 0.5, 2]) == (1.0, 0.5, 2.0)


@pytest.mark.parametrize("size", [[8, 8], [8, 8, 8, 8], [8, 7, 8], [8, 8.5, 8]])
def test_an_invalid_size_is_refused_with_its_key(size):
    with pytest.raises(UsageError, match=r"data\.patch_size must be three ints >= 8, got \["):
        parse_size("data.patch_size", size, minimum=8)


@pytest.mark.parametrize("spacing", [[1, 1], [1, 0, 1], [1, -1, 1], [1, "median", 1]])
def test_an_invalid_spacing_is_refused_with_its_key(spacing):
    with pytest.raises(UsageError, match=r"data\.spacing_mm must be three numbers above 0, got \["):
        parse_spacing("data.spacing_mm", spacing)
