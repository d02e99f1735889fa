import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import map_coordinates

from tests.data.helpers.cases import noise
from unet3d.data.preprocessing.channels import (
    choose_interpolation_orders,
    compute_resampled_shape,
    find_nonzero_box,
    resample,
    resample_labels,
    spread_annotations,
)

SIZES = st.tuples(*[st.integers(1, 9)] * 3)


@given(SIZES, SIZES)
def test_linear_interpolation_matches_torch(size, shape):
    import torch

    volume = noise(*size)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(volume)[None, None], shape, mode="trilinear"
    )
    np.testing.assert_allclose(resample(volume, shape, [1] * 3), expected[0, 0], atol=3e-5)


def test_cubic_interpolation_matches_scipy():
    volume, shape = noise(4, 9, 8), (11, 5, 8)
    positions = [
        np.clip((np.arange(n) + 0.5) * o / n - 0.5, 0, o - 1)
        for n, o in zip(shape, volume.shape, strict=True)
    ]
    grid = np.stack(np.meshgrid(*positions, indexing="ij"))
    expected = map_coordinates(volume.astype(float), grid, order=3, mode="nearest")
    np.testing.assert_allclose(resample(volume, shape, [3] * 3), expected, atol=1e-4)


def test_resampling_labels_adds_no_label_between_two_others():
    labels = np.zeros((8, 8, 8), np.uint8)
    labels[4:] = 2
    resampled = resample_labels(labels, (13, 13, 13), [1] * 3)
    assert set(np.unique(resampled)) == {0, 2}
    assert abs((resampled == 2).mean() - 0.5) < 0.05


@given(SIZES, SIZES, st.tuples(*[st.integers(0, 1)] * 3), st.integers(0, 2**32 - 1))
def test_labels_are_those_of_the_masks_interpolated_as_a_whole(size, shape, orders, seed):
    labels = np.random.default_rng(seed).integers(0, 4, size).astype(np.int16)
    masks = [resample((labels == c).astype(np.float32), shape, orders) for c in range(4)]
    chosen = resample_labels(labels, shape, orders)
    found = np.take_along_axis(np.stack(masks), chosen[None].astype(int), 0)[0]
    np.testing.assert_allclose(found, np.max(masks, 0), atol=1e-4)  # of equal ones, any


@pytest.mark.parametrize(("radius", "tolerance"), [(3, 0.1), (5, 0.03), (8, 0.03)])
def test_classes_keep_their_volume_where_two_voxels_become_one(radius, tolerance):
    shape = (20, 40, 40)
    grid, volumes = np.stack(np.meshgrid(*[np.arange(40)] * 3, indexing="ij")), []
    for seed in range(12):
        center = np.random.default_rng(seed).uniform(15, 25, 3)[:, None, None, None]
        distance = np.linalg.norm(grid - center, axis=0)
        labels = (distance < radius).astype(np.uint8) + (distance < radius / 2)
        resampled = resample_labels(labels, shape, [1] * 3)
        volumes.append((labels > 0).sum() * resampled.size / labels.size / (resampled > 0).sum())
    assert np.mean(volumes) == pytest.approx(1, abs=tolerance)
    sheet = np.zeros((16, 8, 8), np.uint8)
    sheet[3:5] = 1
    assert (resample_labels(sheet, (8, 8, 8), [1] * 3) == 1).mean() == 1 / 8


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("planes", [7, 13, 20, 32, 50])
def test_an_annotated_slice_is_found_in_a_coarser_volume(planes, order):
    for annotated in range(32):
        labels = np.full((6, 6, 32), 255, np.uint8)
        labels[..., annotated] = np.arange(36).reshape(6, 6) % 5
        shape = (6, 6, planes)
        spread = spread_annotations(labels, shape, 255)
        resampled = resample_labels(spread, shape, [order] * 3)
        known = (resampled != 255).all((0, 1))
        thickness = max(1, planes / 32) + 1
        assert 1 <= known.sum() <= thickness
        assert (resampled[..., known] == labels[..., [annotated]]).all()


def test_values_are_not_interpolated_across_a_coarse_axis():
    assert choose_interpolation_orders([1, 1, 2], [1, 1, 1], 3) == [3, 3, 3]
    assert choose_interpolation_orders([5, 1, 1], [1, 1, 1], 3) == [0, 3, 3]
    assert choose_interpolation_orders([1, 1, 1], [1, 5, 1], 3) == [3, 0, 3]
    assert choose_interpolation_orders([5, 5, 1], [1, 1, 1], 3) == [3, 3, 3]


@pytest.mark.parametrize("unit_mm", [1, 1e-3, 1e-6])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_rounding_of_a_header_does_not_decide_whether_an_axis_is_coarse(unit_mm, dtype):
    sizes = (dtype(unit_mm) * np.array([[0.3, 0.3, 0.9], [0.1, 0.1, 0.3]], dtype)).tolist()
    orders = [choose_interpolation_orders(s, [unit_mm] * 3, 3) for s in sizes]
    assert orders == [[3, 3, 3], [3, 3, 3]]


def test_the_box_holds_the_nonzero_voxels_of_all_channels():
    channels = np.zeros((2, 5, 6, 7))
    channels[0, 1, 2, 3] = channels[1, 3, 2, 4] = -1
    assert find_nonzero_box(channels, [0, 0]) == ((1, 4), (2, 3), (3, 5))
    assert find_nonzero_box(np.zeros((1, 2, 3, 4)), [0]) == ((0, 2), (0, 3), (0, 4))


def test_resampling_to_another_spacing_keeps_the_extent():
    assert compute_resampled_shape([10, 20, 30], [1, 1, 2], [2, 0.5, 2]) == (5, 40, 30)
    assert compute_resampled_shape([1, 2, 8], [1, 1, 1], [9, 9, 2]) == (1, 1, 4)
