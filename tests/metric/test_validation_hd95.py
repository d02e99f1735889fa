import numpy as np
import pytest
import torch

from unet3d.metric import validation_hd95
from unet3d.metric.validation_hd95 import ValidationHD95
from unet3d.types import IGNORE_LABEL


def block(start, shape=(1, 12, 12, 12)):
    labels = torch.zeros(shape, dtype=torch.uint8)
    labels[:, start : start + 4, 2:6, 2:6] = 1
    return labels


def test_hd95_is_in_the_cases_own_millimetres_and_its_mean_over_volumes():
    metric = ValidationHD95({"a": [1]}, {"near": (1.0, 1.0, 1.0), "far": (3.0, 1.0, 1.0)})
    for case in ("near", "far"):
        metric.update([case], block(3), block(2))
    assert metric.compute() == {"hd95_mm": 2.0, "hd95_mm/a": 2.0}


def test_what_is_absent_counts_as_in_an_evaluation():
    metric = ValidationHD95({"a": [1], "b": [2]}, {"x": (1.0, 1.0, 2.0)})
    metric.update(["x"], torch.zeros(1, 12, 12, 12, dtype=torch.uint8), block(2))
    diagonal = np.linalg.norm([12, 12, 24])
    found = metric.compute()
    assert found["hd95_mm/a"] == found["hd95_mm"] == pytest.approx(diagonal)
    assert "hd95_mm/b" not in found


def test_ignored_voxels_and_an_empty_validation_have_no_figure():
    metric = ValidationHD95({"a": [1]}, {"x": (1.0, 1.0, 1.0)})
    assert metric.compute() == {}
    metric.update(["x"], block(2), torch.full((1, 12, 12, 12), IGNORE_LABEL))
    assert metric.compute() == {}


def test_noise_is_left_out_instead_of_measured_for_minutes(monkeypatch):
    monkeypatch.setattr(validation_hd95, "MOST_POINTS", 50)
    metric = ValidationHD95({"a": [1]}, {"x": (1.0, 1.0, 1.0)})
    metric.update(["x"], torch.randint(0, 2, (1, 12, 12, 12)), block(2))
    assert metric.compute() == {}
