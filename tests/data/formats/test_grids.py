import numpy as np
import pytest

from unet3d.data.formats.grids import find_offset, paste
from unet3d.data.formats.volume_format import Grid

WHOLE = Grid(shape=(6, 5, 4), affine=np.diag([2.0, 2.0, 3.0, 1.0]))


def make_part(shape, translation, scale=(2.0, 2.0, 3.0)):
    affine = np.diag([*scale, 1.0])
    affine[:3, 3] = translation
    return Grid(shape=shape, affine=affine)


@pytest.mark.parametrize(
    ("part", "offset"),
    [
        (make_part((6, 5, 4), (0, 0, 0)), (0, 0, 0)),
        (make_part((2, 3, 1), (4, 2, 9)), (2, 1, 3)),
        (make_part((2, 3, 1), (4.001, 2, 9)), (2, 1, 3)),
        (make_part((2, 3, 1), (5, 2, 9)), None),  # between two voxels
        (make_part((2, 3, 1), (4, 2, 12)), None),  # outside
        (make_part((2, 3, 1), (-2, 2, 9)), None),
        (make_part((5, 3, 1), (4, 2, 9)), None),
        (make_part((2, 3, 2), (4, 2, 0), (2.0, 2.0, 3.1)), None),
        (make_part((2, 3, 2), (4, 8, 0), (2.0, -2.0, 3.0)), None),
    ],
)
def test_a_part_of_a_grid_has_an_offset(part, offset):
    assert find_offset(part, WHOLE) == offset


def test_a_part_is_pasted_at_its_offset():
    part = np.arange(1, 7).reshape(1, 2, 3, 1)
    whole = paste(part, (2, 1, 3), WHOLE.shape)
    assert whole.shape == (1, 6, 5, 4)
    np.testing.assert_array_equal(whole[:, 2:4, 1:4, 3:], part)
    assert whole.sum() == part.sum()
