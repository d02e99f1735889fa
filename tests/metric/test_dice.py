import math

import pytest
import torch

from unet3d.metric.dice import Dice
from unet3d.types import IGNORE_LABEL


def one_hot(classes, k):
    return torch.nn.functional.one_hot(classes.long(), k).movedim(-1, 1).float()


def test_dice_and_iou_equal_monais_on_whole_volumes():
    from monai.metrics import DiceMetric, MeanIoU

    metric, monais = Dice(["background", "a", "b"]), (DiceMetric(), MeanIoU())
    for _ in range(3):
        reference = torch.randint(0, 3, (1, 6, 5, 4))
        predicted = torch.randint(0, 3, (1, 6, 5, 4))
        metric.update(predicted, reference)
        for monai_metric in monais:
            monai_metric(one_hot(predicted, 3)[:, 1:], one_hot(reference, 3)[:, 1:])
    scores = metric.compute()
    assert scores["dice"] == pytest.approx(monais[0].aggregate().item(), abs=1e-6)
    assert scores["iou"] == pytest.approx(monais[1].aggregate().item(), abs=1e-6)


def test_a_class_absent_from_both_is_skipped_and_a_false_positive_scores_zero():
    metric = Dice(["background", "a", "b"])
    empty, full = torch.zeros(1, 2, 2, 2), torch.ones(1, 2, 2, 2)
    metric.update(full, empty)
    scores = metric.compute()
    assert scores["dice/a"] == 0
    assert math.isnan(scores["dice/b"])
    assert scores["dice"] == 0


def test_a_region_is_scored_as_the_union_of_its_labels():
    metric = Dice(["background", "a", "b", "c"], {"whole": [1, 2, 3], "core": [2, 3]})
    reference = torch.tensor([0, 1, 2, 3]).view(1, 1, 1, 4)
    metric.update(torch.tensor([0, 2, 3, 3]).view(1, 1, 1, 4), reference)
    scores = metric.compute()
    assert scores["dice/whole"] == 1
    assert scores["dice/core"] == 2 * 2 / (3 + 2)
    assert scores["iou/core"] == 2 / 3
    assert scores["dice"] == (1 + 0.8) / 2
    assert set(scores) == {"dice", "iou", "dice/whole", "dice/core", "iou/whole", "iou/core"}


def test_voxels_of_classes_and_regions_are_counted_without_ignored_ones():
    reference = torch.tensor([0, 1, 2, 2, IGNORE_LABEL]).view(1, 1, 1, 5)
    prediction = torch.tensor([2, 2, 2, 0, 1]).view(1, 1, 1, 5)
    for regions, expected in (
        (None, {"a": (1, 0), "b": (2, 3)}),
        ({"both": [1, 2]}, {"both": (3, 3)}),
    ):
        metric = Dice(["background", "a", "b"], regions)
        metric.update(prediction, reference)
        assert metric.voxels() == expected
