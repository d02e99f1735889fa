import math

import numpy as np
import pytest
import torch

from unet3d.metric.dice import Dice
from unet3d.metric.scores import SCORES, find_labels, score_case
from unet3d.metric.surface import surface_scores

SPACING = (0.5, 1.0, 2.0)
CLASSES = {"a": (1,), "b": (2,)}


def volumes(seed, classes=3):
    rng = np.random.default_rng(seed)
    return rng.integers(0, classes, (2, 9, 8, 7)).astype(np.uint8)


def test_overlap_equals_monais_and_that_of_the_training():
    from monai.metrics import compute_dice, compute_iou

    prediction, reference = volumes(0)
    found = score_case(prediction, reference, spacing_mm=SPACING, classes=CLASSES)
    onehot = [
        torch.nn.functional.one_hot(torch.from_numpy(a).long(), 3).movedim(-1, 0)[None]
        for a in (prediction, reference)
    ]
    training = Dice(["background", "a", "b"])
    training.update(torch.from_numpy(prediction)[None], torch.from_numpy(reference)[None])
    for c, name in enumerate("ab"):
        dice, iou = (
            f(*onehot, include_background=False)[0, c] for f in (compute_dice, compute_iou)
        )
        assert found[name]["dice"] == pytest.approx(dice.item(), abs=1e-6)
        assert found[name]["iou"] == pytest.approx(iou.item(), abs=1e-6)
        assert found[name]["dice"] == pytest.approx(training.compute()[f"dice/{name}"], abs=1e-12)


def test_distances_are_those_of_the_uncropped_structures():
    prediction, reference = np.zeros((2, 20, 20, 20), np.uint8)
    prediction[12:15, 3:6, 0:4], reference[11:15, 4:9, 0:3] = 2, 2
    prediction[0, 0, 0] = 1
    found = score_case(prediction, reference, spacing_mm=SPACING, classes=CLASSES, tolerance_mm=1.5)
    expected = surface_scores(prediction == 2, reference == 2, spacing_mm=SPACING, tolerance_mm=1.5)
    assert (found["b"]["hd95_mm"], found["b"]["surface_dice"]) == expected


def test_volumes_are_in_millilitres():
    prediction, reference = np.zeros((2, 10, 10, 20), np.uint8)
    reference[...], prediction[:5] = 1, 1
    found = score_case(prediction, reference, spacing_mm=SPACING, classes=CLASSES)["a"]
    volumes_ml = [found[k] for k in ("reference_ml", "prediction_ml", "difference_ml")]
    assert volumes_ml == [2.0, 1.0, -1.0]


def test_a_class_absent_from_both_is_left_out():
    nothing = np.zeros((4, 4, 4), np.uint8)
    found = score_case(nothing, nothing, spacing_mm=SPACING, classes=CLASSES)["a"]
    assert list(found) == list(SCORES)
    assert all(math.isnan(found[k]) for k in ("dice", "iou", "hd95_mm", "surface_dice"))
    assert [v for k, v in found.items() if k.endswith("_ml")] == [0, 0, 0]


@pytest.mark.parametrize("missed", [True, False])
def test_a_class_absent_from_one_scores_the_worst_that_can_be(missed):
    nothing, some = np.zeros((2, 6, 8, 5), np.uint8)
    some[1, 1, 1] = 1
    pair = (nothing, some) if missed else (some, nothing)
    found = score_case(*pair, spacing_mm=SPACING, classes=CLASSES)["a"]
    assert [found[k] for k in ("dice", "iou", "surface_dice")] == [0, 0, 0]
    assert found["hd95_mm"] == pytest.approx(math.sqrt(3**2 + 8**2 + 10**2))


def test_a_region_is_one_class_of_several_labels():
    prediction, reference = volumes(1)
    found = score_case(
        prediction, reference, spacing_mm=SPACING, classes={"whole": (1, 2), "core": (2,)}
    )
    union = [(a > 0).astype(np.uint8) for a in (prediction, reference)]
    merged = score_case(*union, spacing_mm=SPACING, classes={"whole": (1,)})
    alone = score_case(prediction, reference, spacing_mm=SPACING, classes=CLASSES)
    assert found == {"whole": merged["whole"], "core": alone["b"]}


def test_ignored_voxels_count_nowhere():
    prediction, reference = volumes(2)
    half = np.arange(9) < 4
    ignoring = np.where(half[:, None, None], 9, reference)
    found = score_case(prediction, ignoring, spacing_mm=SPACING, classes=CLASSES, ignore_label=9)
    emptied = [np.where(half[:, None, None], 0, a) for a in (prediction, reference)]
    assert found == score_case(*emptied, spacing_mm=SPACING, classes=CLASSES)


def test_a_class_may_have_a_tolerance_of_its_own():
    prediction, reference = np.zeros((2, 12, 12, 12), np.uint8)
    prediction[2:4, 2, 2], reference[2:4, 4, 2] = 1, 1
    prediction[2:4, 8, 8], reference[2:4, 10, 8] = 2, 2
    settings = {"spacing_mm": (1, 1, 1), "classes": CLASSES}
    found = score_case(prediction, reference, tolerance_mm={"a": 1.0, "b": 2.0}, **settings)
    assert (found["a"]["surface_dice"], found["b"]["surface_dice"]) == (0, 1)


def test_labels_may_be_large_and_few():
    prediction = np.zeros((5, 5, 5), np.int32)
    prediction[1:3] = 40_000
    classes = {"far": (40_000,)}
    assert find_labels(prediction) == [0, 40_000]
    found = score_case(prediction, prediction, spacing_mm=SPACING, classes=classes)["far"]
    assert (found["dice"], found["hd95_mm"], found["surface_dice"]) == (1, 0, 1)
