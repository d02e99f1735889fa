import numpy as np
import pytest
import torch

from unet3d.metric import case_scores
from unet3d.metric.case_scores import ValidationHD95
from unet3d.types import IGNORE_LABEL


def make_block(start, shape=(1, 12, 12, 12)):
    labels = torch.zeros(shape, dtype=torch.uint8)
    labels[:, start : start + 4, 2:6, 2:6] = 1
    return labels


def test_hd95_uses_each_cases_spacing_and_is_averaged_over_volumes():
    metric = ValidationHD95({"a": [1]}, {"near": (1.0, 1.0, 1.0), "far": (3.0, 1.0, 1.0)})
    for case in ("near", "far"):
        metric.update([case], make_block(3), make_block(2))
    assert metric.compute() == {"hd95_mm": 2.0, "hd95_mm/a": 2.0}


def test_absent_classes_score_as_in_an_evaluation():
    metric = ValidationHD95({"a": [1], "b": [2]}, {"x": (1.0, 1.0, 2.0)})
    metric.update(["x"], torch.zeros(1, 12, 12, 12, dtype=torch.uint8), make_block(2))
    diagonal = np.linalg.norm([12, 12, 24])
    scores = metric.compute()
    assert scores["hd95_mm/a"] == scores["hd95_mm"] == pytest.approx(diagonal)
    assert "hd95_mm/b" not in scores


def test_ignored_voxels_and_an_empty_validation_have_no_score():
    metric = ValidationHD95({"a": [1]}, {"x": (1.0, 1.0, 1.0)})
    assert metric.compute() == {}
    metric.update(["x"], make_block(2), torch.full((1, 12, 12, 12), IGNORE_LABEL))
    assert metric.compute() == {}


def test_noise_is_skipped_instead_of_measured_for_minutes(monkeypatch):
    monkeypatch.setattr(case_scores, "MAX_POINTS", 50)
    metric = ValidationHD95({"a": [1]}, {"x": (1.0, 1.0, 1.0)})
    metric.update(["x"], torch.randint(0, 2, (1, 12, 12, 12)), make_block(2))
    assert metric.compute() == {}
