"""Scores of validation cases: HD95, and the metrics of the config group."""

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from unet3d.errors import UsageError
from unet3d.loss.skeleton_recall import skeletonize
from unet3d.metric import case_scores
from unet3d.metric.calibration import CalibrationError
from unet3d.metric.case_scores import CaseMetricAccumulator
from unet3d.metric.class_metrics import CenterlineDice, LesionScores, VolumeError, find_skeleton
from unet3d.types import IGNORE_LABEL

SPACING = (1.0, 1.0, 2.0)


def make_mask(*boxes, shape=(20, 20, 20)):
    mask = np.zeros(shape, bool)
    for d, h, w in boxes:
        mask[slice(*d), slice(*h), slice(*w)] = True
    return mask


def test_the_volume_error_is_a_fraction_of_the_reference():
    reference, prediction = make_mask(((0, 4), (0, 5), (0, 5))), make_mask(((0, 3), (0, 5), (0, 5)))
    assert VolumeError()(prediction, reference, SPACING) == {"volume_error": 0.25}
    assert VolumeError()(reference, prediction, SPACING)["volume_error"] == pytest.approx(1 / 3)
    empty = np.zeros_like(reference)
    assert VolumeError()(empty, reference, SPACING) == {"volume_error": 1.0}
    assert np.isnan(VolumeError()(reference, empty, SPACING)["volume_error"])


def test_the_skeleton_is_that_of_the_skeleton_recall_loss():
    rng = np.random.default_rng(0)
    mask = make_mask(((2, 18), (3, 9), (5, 12))) ^ make_mask(((4, 9), (5, 15), (6, 16)))
    mask &= rng.random(mask.shape) > 0.02
    padded = torch.from_numpy(np.pad(mask, 1))  # the loss takes voxels beyond a patch for inside
    expected = skeletonize(padded, iterations=20)[1:-1, 1:-1, 1:-1]
    assert np.array_equal(find_skeleton(mask), expected.numpy())


def test_centerline_dice_does_not_depend_on_thickness_but_on_length():
    thin, thick = make_mask(((2, 18), (9, 10), (9, 10))), make_mask(((1, 19), (8, 11), (8, 11)))
    half = make_mask(((2, 10), (9, 10), (9, 10)))
    metric = CenterlineDice()
    assert metric(thin, thin, SPACING) == {"cldice": 1.0}
    assert metric(thin, thick, SPACING)["cldice"] > 0.85
    assert metric(half, thin, SPACING)["cldice"] == pytest.approx(2 * 0.5 / 1.5)
    assert metric(np.zeros_like(thin), thin, SPACING) == {"cldice": 0.0}


def test_lesions_count_whatever_their_size():
    large, small = ((0, 9), (0, 9), (0, 9)), ((12, 13), (12, 13), (12, 13))
    part, wrong = ((0, 5), (0, 9), (0, 9)), ((16, 18), (0, 2), (0, 2))
    reference, prediction = make_mask(large, small), make_mask(part, wrong)
    scores = LesionScores()(prediction, reference, SPACING)
    assert scores == {"lesion_f1": 0.5, "lesion_sensitivity": 0.5, "lesion_precision": 0.5}
    strict = LesionScores(min_overlap=0.6)(prediction, reference, SPACING)
    assert (strict["lesion_sensitivity"], strict["lesion_f1"]) == (0.0, 0.0)
    both = LesionScores()(reference, reference, SPACING)
    assert set(both.values()) == {1.0}
    nowhere = LesionScores()(reference, make_mask(), SPACING)
    assert (nowhere["lesion_f1"], nowhere["lesion_precision"]) == (0.0, 0.0)
    assert np.isnan(nowhere["lesion_sensitivity"])


def test_lesions_that_touch_at_a_corner_are_one_or_two():
    touching = make_mask(((0, 2), (0, 2), (0, 2)), ((2, 4), (2, 4), (2, 4)))
    found = make_mask(((0, 2), (0, 2), (0, 2)))
    sensitivity = {
        n: LesionScores(connectivity=n)(found, touching, SPACING)["lesion_sensitivity"]
        for n in (6, 18, 26)
    }
    assert sensitivity == {6: 0.5, 18: 0.5, 26: 1.0}


def make_logits():
    torch.manual_seed(0)
    logits = 2 * torch.randn(4, 6, 7, 8)
    labels = torch.randint(0, 4, (6, 7, 8)).to(torch.uint8)
    labels[0, 0] = IGNORE_LABEL
    labels[0, 1] = 254  # background or a class that the case does not annotate
    return logits, labels


def test_the_calibration_error_is_torchmetrics_part_by_part():
    logits, labels = make_logits()
    metric = CalibrationError()
    metric.start()
    for part in (slice(0, 2), slice(2, 6)):
        metric.update(logits[:, part], labels[part])
    confidence, predicted = logits.softmax(0).max(0)
    counted = ((predicted > 0) | (labels > 0)) & (labels < 4)
    correct = (predicted == labels)[counted].long()
    expected = binary_calibration_error(confidence[counted], correct, n_bins=15)
    assert metric.finish()["ece"] == pytest.approx(float(expected), abs=1e-6)
    metric.start()
    metric.update(torch.tensor([[9.0], [0.0]]), torch.tensor([0], dtype=torch.uint8))
    assert np.isnan(metric.finish()["ece"])  # no foreground


def test_regions_are_calibrated_one_by_one():
    labels = torch.tensor([1, 2, 2, 0], dtype=torch.uint8)
    logits = torch.tensor([[40.0, 40.0, -40.0, -40.0], [-4.0, 4.0, 4.0, -4.0]])
    metric = CalibrationError(regions={"whole": [1, 2], "core": [2]})
    metric.update(logits, labels)
    confidence = float(torch.tensor(4.0).sigmoid())  # of two decisions; three have 1 in float32
    assert metric.finish()["ece"] == pytest.approx((2 * confidence + 3 - 4) / 5, abs=1e-6)


def test_scores_of_cases_are_means_over_those_that_have_a_class():
    metrics = [VolumeError(), CalibrationError()]
    classes, spacings = {"a": [1], "b": [2]}, {"x": SPACING, "y": SPACING}
    scores = CaseMetricAccumulator(metrics, classes, spacings, hd95=False)
    a = torch.tensor([[[1, 1, 0, 0]]], dtype=torch.uint8)
    for case, labels, predicted in (("x", a, torch.ones_like(a)), ("y", a, a)):
        observe = scores.begin(labels)
        observe([(0, 1), (0, 1), (0, 4)], torch.randn(3, 1, 1, 4))
        scores.end(case, predicted, labels)
    result = scores.compute()
    assert list(result) == ["ece", "volume_error", "volume_error/a", "volume_error/b"]
    assert result["volume_error"] == result["volume_error/a"] == 0.5
    assert np.isnan(result["volume_error/b"])
    scores.reset()
    assert scores.compute() == {}


def test_invalid_options_are_an_error():
    for build in (
        lambda: LesionScores(min_overlap=1.0),
        lambda: LesionScores(connectivity=8),
        lambda: CalibrationError(bins=1),
    ):
        with pytest.raises(UsageError, match="metrics"):
            build()


def make_block(start, shape=(12, 12, 12)):
    labels = torch.zeros(shape, dtype=torch.uint8)
    labels[start : start + 4, 2:6, 2:6] = 1
    return labels


def score_hd95(*pairs, classes=("a",), spacings=((1.0, 1.0, 2.0),)):
    """Return the HD95 of a validation with these predictions and references."""
    spacing_mm = {f"case_{n}": mm for n, mm in enumerate(spacings)}
    labels = {name: [label] for label, name in enumerate(classes, 1)}
    metric = CaseMetricAccumulator([], labels, spacing_mm, hd95=True)
    for case, pair in zip(spacing_mm, pairs, strict=False):
        assert metric.begin(pair[1]) is None
        metric.end(case, *pair)
    return metric.compute()


def test_hd95_uses_each_cases_spacing_and_is_averaged_over_volumes():
    pair, spacings = (make_block(3), make_block(2)), ((1.0, 1.0, 1.0), (3.0, 1.0, 1.0))
    assert score_hd95(pair, pair, spacings=spacings) == {"hd95_mm": 2.0, "hd95_mm/a": 2.0}


def test_classes_without_a_voxel_score_as_in_an_evaluation_and_unknown_ones_not_at_all(monkeypatch):
    empty, block = make_block(20), make_block(2)
    diagonal = pytest.approx(np.linalg.norm([12, 12, 24]))
    expected = {"hd95_mm": diagonal, "hd95_mm/a": diagonal}
    assert score_hd95((empty, block), classes=("a", "b")) == expected
    assert score_hd95((block, torch.full_like(block, IGNORE_LABEL))) == score_hd95() == {}
    monkeypatch.setattr(case_scores, "MAX_POINTS", 50)
    noise = torch.randint(0, 2, block.shape)
    assert score_hd95((noise, block)) == {}  # it would be measured for minutes
