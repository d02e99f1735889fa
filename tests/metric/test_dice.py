import math

import pytest
import torch

from unet3d.metric.dice import Dice
from unet3d.types import IGNORE


def logits_of(classes, k):
    return torch.nn.functional.one_hot(classes.long(), k).movedim(-1, 1).float()


def test_dice_and_iou_equal_monais_on_whole_volumes():
    from monai.metrics import DiceMetric, MeanIoU

    metric, theirs = Dice(["background", "a", "b"]), (DiceMetric(), MeanIoU())
    for _ in range(3):
        reference = torch.randint(0, 3, (1, 6, 5, 4))
        predicted = torch.randint(0, 3, (1, 6, 5, 4))
        metric.update(logits_of(predicted, 3), reference.to(torch.uint8))
        for other in theirs:
            other(logits_of(predicted, 3)[:, 1:], logits_of(reference, 3)[:, 1:])
    scores = metric.compute()
    assert scores["dice"] == pytest.approx(theirs[0].aggregate().item(), abs=1e-6)
    assert scores["iou"] == pytest.approx(theirs[1].aggregate().item(), abs=1e-6)


def test_the_mean_is_over_volumes_and_not_over_voxels():
    metric = Dice(["background", "a"])
    large, small = torch.ones(1, 4, 4, 4), torch.zeros(1, 4, 4, 4)
    small[0, 0, 0, 0] = 1
    metric.update(logits_of(large, 2), large.to(torch.uint8))  # 1
    metric.update(logits_of(torch.zeros(1, 4, 4, 4), 2), small.to(torch.uint8))  # 0
    assert metric.compute()["dice/a"] == 0.5


def test_a_class_absent_from_both_is_left_out_and_a_wrong_one_scores_zero():
    metric = Dice(["background", "a", "b"])
    nothing, some = torch.zeros(1, 2, 2, 2), torch.ones(1, 2, 2, 2)
    metric.update(logits_of(some, 3), nothing.to(torch.uint8))
    scores = metric.compute()
    assert scores["dice/a"] == 0
    assert math.isnan(scores["dice/b"])
    assert scores["dice"] == 0


def test_ignored_voxels_count_nowhere():
    metric = Dice(["background", "a"])
    reference = torch.ones(1, 2, 2, 2, dtype=torch.uint8)
    predicted = torch.ones(1, 2, 2, 2)
    predicted[0, 0] = 0
    reference[0, 0] = IGNORE
    metric.update(logits_of(predicted, 2), reference)
    assert metric.compute()["dice/a"] == 1


def test_update_returns_the_predicted_classes_and_reset_forgets():
    metric = Dice(["background", "a"])
    predicted = torch.randint(0, 2, (1, 3, 3, 3))
    assert metric.update(logits_of(predicted, 2), predicted.to(torch.uint8)).equal(
        predicted.to(torch.uint8)
    )
    metric.reset()
    assert metric.matrices == []
