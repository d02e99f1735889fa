from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unet3d.build.topology import first_patch, levels, smaller, target_spacing, whole

SPACING = st.tuples(*[st.floats(0.3, 8)] * 3)
SIZE = st.tuples(*[st.integers(4, 400)] * 3)


def test_the_hippocampus_gets_nnunets_patch_and_pooling():
    patch = first_patch((1, 1, 1), (36, 50, 35))
    shape = levels((1, 1, 1), patch)
    assert whole(patch, shape.factor) == (40, 56, 40)
    assert shape.windows == ((2, 2, 2),) * 3
    assert shape.kernels == ((3, 3, 3),) * 4


def test_a_coarse_axis_is_neither_pooled_nor_convolved_until_the_others_have_caught_up():
    shape = levels((5, 1, 1), (16, 128, 128))
    assert shape.windows[:3] == ((1, 2, 2), (1, 2, 2), (2, 2, 2))
    assert shape.kernels[:3] == ((1, 3, 3), (1, 3, 3), (3, 3, 3))


def test_the_spacing_is_the_median_but_a_fine_one_along_a_coarse_and_thin_axis():
    assert target_spacing([(1, 1, 2), (1, 1, 3), (2, 1, 4)], [(64, 64, 40)] * 3) == (1, 1, 3)
    thin = target_spacing([(1, 1, 4), (1, 1, 6), (1, 1, 8)], [(256, 256, 20)] * 3)
    assert thin == pytest.approx((1, 1, 4.4))


@given(SPACING, SIZE)
def test_every_level_keeps_four_voxels_and_patches_divide(spacing, size):
    patch = whole(first_patch(spacing, size), levels(spacing, first_patch(spacing, size)).factor)
    while patch is not None:
        factor = levels(spacing, patch).factor
        assert all(n % f == 0 for n, f in zip(patch, factor, strict=True))
        assert all(n // f >= 4 or f == 1 for n, f in zip(patch, factor, strict=True))
        less = smaller(patch, spacing, size)
        assert less is None or prod(less) < prod(patch)
        patch = less
