import numpy as np
import pytest
import torch

from unet3d.metric.scores import compute_surface_scores, find_surface_voxels

SPACINGS = [(1.0, 1.0, 1.0), (0.7, 0.7, 3.0), (5.0, 0.5, 1.3)]


def make_blob(seed, shape=(14, 17, 12)):
    from scipy.ndimage import gaussian_filter

    noise = gaussian_filter(np.random.default_rng(seed).normal(size=shape), 1.5)
    return noise > np.quantile(noise, 0.8)


def compute_with_monai(prediction, reference, spacing_mm, tolerance_mm):
    from monai.metrics import compute_hausdorff_distance, compute_surface_dice

    p, r = (torch.from_numpy(a)[None, None] for a in (prediction, reference))
    common = {"include_background": True, "spacing": list(spacing_mm)}
    hd95 = compute_hausdorff_distance(p, r, percentile=95, **common)
    return hd95.item(), compute_surface_dice(p, r, [tolerance_mm], **common).item()


@pytest.mark.filterwarnings("ignore::FutureWarning:monai")
@pytest.mark.parametrize("spacing_mm", SPACINGS)
@pytest.mark.parametrize("seed", range(4))
def test_distances_equal_monais(spacing_mm, seed):
    prediction, reference = (
        make_blob(seed),
        make_blob(seed + 100),
    )  # blobs touch the volume's border
    scores = compute_surface_scores(prediction, reference, spacing_mm=spacing_mm, tolerance_mm=1.4)
    expected = compute_with_monai(prediction, reference, spacing_mm, 1.4)
    assert scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning:monai")
def test_a_crop_around_both_structures_changes_nothing():
    full = np.zeros((2, 40, 30, 30), bool)
    full[0, 3:9, 4:9, 5:7] = full[1, 5:12, 4:8, 5:9] = True
    cropped = full[:, 3:12, 4:9, 5:9]
    settings = {"spacing_mm": (1, 2, 3), "tolerance_mm": 2.0}
    scores = compute_surface_scores(cropped[0], cropped[1], **settings)
    assert scores == compute_surface_scores(full[0], full[1], **settings)
    assert scores == pytest.approx(compute_with_monai(full[0], full[1], (1, 2, 3), 2.0), abs=1e-4)


def test_single_voxels_are_as_far_apart_as_their_centers():
    prediction, reference = np.zeros((2, 8, 8, 8), bool)
    prediction[1, 1, 1] = reference[1, 4, 5] = True
    settings = {"spacing_mm": (1.0, 1.0, 2.0)}
    distance = np.hypot(3, 8)
    for tolerance_mm, expected in ((8.5, 0), (8.6, 1)):
        scores = compute_surface_scores(
            prediction, reference, tolerance_mm=tolerance_mm, **settings
        )
        assert scores == (distance, expected)


def test_equal_structures_have_distance_0_and_full_agreement():
    structure = make_blob(0)
    scores = compute_surface_scores(structure, structure, spacing_mm=(1, 1, 1), tolerance_mm=0)
    assert scores == (0, 1)


def test_a_distance_equal_to_the_tolerance_is_within_it():
    prediction, reference = np.zeros((2, 8, 3, 3), bool)
    prediction[1, 1, 1] = reference[4, 1, 1] = True
    assert 3 * 0.1 > 0.3  # in float64
    settings = {"spacing_mm": (0.1,) * 3, "tolerance_mm": 0.3}
    assert compute_surface_scores(prediction, reference, **settings)[1] == 1


def test_the_surface_is_the_shell_including_voxels_at_the_border():
    structure = np.zeros((6, 6, 6), bool)
    structure[0:4, 1:5, 1:5] = True
    inner = np.zeros_like(structure)
    inner[1:3, 2:4, 2:4] = True
    assert (find_surface_voxels(structure) == (structure & ~inner)).all()


def test_the_larger_of_the_two_directions_counts():
    prediction, reference = np.zeros((2, 20, 3, 3), bool)
    reference[0] = prediction[0] = True
    prediction[10] = True  # every reference voxel is near, half of the predicted ones are not
    forward = compute_surface_scores(prediction, reference, spacing_mm=(1, 1, 1), tolerance_mm=1)
    backward = compute_surface_scores(reference, prediction, spacing_mm=(1, 1, 1), tolerance_mm=1)
    assert forward == backward == (10, pytest.approx(18 / 27))
