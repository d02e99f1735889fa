import numpy as np
import pytest
import torch

from unet3d.errors import UsageError
from unet3d.metric.scores import compute_surface_scores, find_labels, score_case

SPACING = (0.5, 1.0, 2.0)
CLASSES = {"a": (1,), "b": (2,)}


def test_volumes_are_in_milliliters():
    prediction, reference = np.zeros((2, 10, 10, 20), np.uint8)
    reference[...], prediction[:5] = 1, 1
    scores = score_case(prediction, reference, spacing_mm=SPACING, classes=CLASSES)["a"]
    volumes_ml = [scores[k] for k in ("reference_ml", "prediction_ml", "difference_ml")]
    assert volumes_ml == [2.0, 1.0, -1.0]
    assert (scores["dice"], scores["iou"]) == pytest.approx((2 / 3, 1 / 2))


def test_each_class_may_have_its_own_tolerance():
    prediction, reference = np.zeros((2, 12, 12, 12), np.uint8)
    prediction[2:4, 2, 2], reference[2:4, 4, 2] = 1, 1
    prediction[2:4, 8, 8], reference[2:4, 10, 8] = 2, 2
    settings = {"spacing_mm": (1, 1, 1), "classes": CLASSES}
    scores = score_case(prediction, reference, tolerance_mm={"a": 1.0, "b": 2.0}, **settings)
    assert (scores["a"]["surface_dice"], scores["b"]["surface_dice"]) == (0, 1)


class Overwrite:
    def __init__(self, name="overlap"):
        self.scores, self.name = {"overlap": "voxels of both masks"}, name

    def __call__(self, prediction, reference, spacing_mm):
        prediction &= reference
        reference[...] = False
        return {self.name: float(prediction.sum())}


def test_a_metric_that_changes_its_masks_changes_no_other_score():
    prediction, reference = np.zeros((2, 12, 12, 12), np.uint8)
    prediction[2:6, 2:6, 2:6], reference[3:7, 2:6, 2:6] = 1, 1
    settings = {"spacing_mm": SPACING, "classes": CLASSES}
    alone = score_case(prediction, reference, **settings)["a"]
    both = score_case(prediction, reference, metrics=[Overwrite(), Overwrite()], **settings)["a"]
    assert both == alone | {"overlap": 48}
    with pytest.raises(UsageError, match="Overwrite returns 'overlpa', which its `scores` do not"):
        score_case(prediction, reference, metrics=[Overwrite("overlpa")], **settings)


def test_label_values_may_be_large():
    prediction = np.zeros((5, 5, 5), np.int32)
    prediction[1:3] = 40_000
    classes = {"far": (40_000,)}
    assert find_labels(prediction) == [0, 40_000]
    scores = score_case(prediction, prediction, spacing_mm=SPACING, classes=classes)["far"]
    assert (scores["dice"], scores["hd95_mm"], scores["surface_dice"]) == (1, 0, 1)


@pytest.mark.filterwarnings("ignore::FutureWarning:monai")
def test_distances_of_masks_that_touch_the_border_equal_monais():
    from monai.metrics import compute_hausdorff_distance, compute_surface_dice

    masks = np.random.default_rng(0).random((2, 14, 17, 12)) > 0.6
    scores = compute_surface_scores(*masks, spacing_mm=SPACING, tolerance_mm=0.8)
    p, r = torch.from_numpy(masks)[:, None, None]
    options = {"include_background": True, "spacing": list(SPACING)}
    hd95 = compute_hausdorff_distance(p, r, percentile=95, **options)
    surface_dice = compute_surface_dice(p, r, [0.8], **options)
    assert scores == pytest.approx((hd95.item(), surface_dice.item()), abs=1e-4)


def test_a_distance_equal_to_the_tolerance_is_within_it():
    prediction, reference = np.zeros((2, 8, 3, 3), bool)
    prediction[1, 1, 1] = reference[4, 1, 1] = True
    assert 3 * 0.1 > 0.3  # in float64
    settings = {"spacing_mm": (0.1,) * 3, "tolerance_mm": 0.3}
    assert compute_surface_scores(prediction, reference, **settings)[1] == 1


@pytest.mark.parametrize("first", [0, 2], ids=["at the border", "inside"])
def test_faces_towards_ignored_voxels_are_no_surface(first):
    """Slices that are annotated alone have the distances of their outlines."""
    prediction, reference = np.zeros((2, 12, 24, 24), np.uint8)
    prediction[:, 4:16, 5:20], reference[:, 4:19, 5:20] = 1, 1
    reference[[z for z in range(12) if (z - first) % 4]] = 255
    spacing_mm, outlines = (3.0, 1.0, 1.5), []
    for mask in (prediction[first] == 1, reference[first] == 1):
        inside = mask[1:-1, 1:-1] & mask[2:, 1:-1] & mask[:-2, 1:-1]
        inside &= mask[1:-1, 2:] & mask[1:-1, :-2]
        outlines.append(np.argwhere(mask & ~np.pad(inside, 1)) * spacing_mm[1:])
    distances = np.linalg.norm(outlines[0][:, None] - outlines[1], axis=-1)
    ways = [distances.min(1), distances.min(0)]
    settings = {"spacing_mm": spacing_mm, "classes": {"a": (1,)}, "ignore_labels": [255]}
    scores = score_case(prediction, reference, **settings)["a"]
    if first:  # or voxels at the border of the volume are on the surface
        assert scores["hd95_mm"] == max(np.percentile(way, 95) for way in ways) == 3
        assert scores["surface_dice"] == pytest.approx(np.mean(np.concatenate(ways) <= 1))
    reference[:, 3:20, 4:21][reference[:, 3:20, 4:21] == 0] = 255  # no voxel beside it is known
    scores = score_case(prediction, reference, **settings)["a"]
    assert np.isnan(scores["hd95_mm"]) == bool(first)
    assert scores["dice"] < 1
