import numpy as np
import pytest

from unet3d.data.formats.volume_format import Grid
from unet3d.data.formats.volumes import find_offset

WHOLE = Grid(shape=(6, 5, 4), affine=np.diag([2.0, 2.0, 3.0, 1.0]))


@pytest.mark.parametrize(
    ("shape", "translation", "scale", "offset"),
    [
        ((6, 5, 4), (0, 0, 0), (2.0, 2.0, 3.0), (0, 0, 0)),
        ((2, 3, 1), (4.001, 2, 9), (2.0, 2.0, 3.0), (2, 1, 3)),
        ((2, 3, 1), (5, 2, 9), (2.0, 2.0, 3.0), None),  # between two voxels
        ((2, 3, 1), (4, 2, 12), (2.0, 2.0, 3.0), None),  # outside
        ((2, 3, 1), (-2, 2, 9), (2.0, 2.0, 3.0), None),
        ((5, 3, 1), (4, 2, 9), (2.0, 2.0, 3.0), None),
        ((2, 3, 2), (4, 2, 0), (2.0, 2.0, 3.1), None),
        ((2, 3, 2), (4, 8, 0), (2.0, -2.0, 3.0), None),
    ],
)
def test_a_part_of_a_grid_has_an_offset(shape, translation, scale, offset):
    affine = np.diag([*scale, 1.0])
    affine[:3, 3] = translation
    assert find_offset(Grid(shape=shape, affine=affine), WHOLE) == offset
