"""Warnings about classes that are never predicted and a loss that stays flat."""

import random
from types import SimpleNamespace

import pytest
import torch

from unet3d.metric.dice import Dice
from unet3d.report.curves import Curve
from unet3d.training.callbacks.stopping import StoppingLimits
from unet3d.training.callbacks.training_warnings import (
    LOWER_RATE,
    MIN_POINTS,
    TrainingWarnings,
    detect_divergence,
    detect_plateau,
    suggest_overrides,
)
from unet3d.training.distributed import RankAgreement
from unet3d.types import IGNORE_LABEL

SUGGESTED = {"class": ["model.width=16"], "loss": ["optimizer.lr=1"]}
REFERENCE = torch.tensor([0, 1, 1, 2, 2, 2, 2, IGNORE_LABEL]).view(1, 1, 1, 8)
GOOD = REFERENCE.where(REFERENCE != IGNORE_LABEL, 0)
WITHOUT_2 = torch.tensor([0, 1, 1, 0, 0, 0, 0, 2]).view(1, 1, 1, 8)  # one, but it is ignored


class Validations:
    """A run of 20 steps with a validation after each."""

    def __init__(self, regions=None):
        self.warnings = TrainingWarnings(
            StoppingLimits(RankAgreement(), max_steps=20),
            Curve(),
            lambda kind, out_of_time: SUGGESTED[kind],
        )
        self.lines = []
        self.metric = Dice(["background", "a", "b"], regions)
        self.module = SimpleNamespace(
            metric=self.metric,
            print=self.lines.append,
            nonfinite_guard=SimpleNamespace(loss=1.0, skipped=0),
        )
        self.trainer = SimpleNamespace(sanity_checking=False, global_step=0, max_epochs=None)

    def step(self, *losses):
        for loss in losses:
            self.module.nonfinite_guard.loss = loss
            self.warnings.loss.add(self.trainer.global_step, loss)
            self.warnings.on_train_batch_end(self.trainer, self.module)

    def after(self, *predictions):
        for prediction in predictions:
            self.trainer.global_step += 1
            self.metric.reset()
            self.metric.update(prediction, REFERENCE)
            self.warnings.on_validation_end(self.trainer, self.module)
        return self.lines


MISSING = "no voxel of the validation set is predicted as b (for {}); try model.width=16"


def test_a_class_without_predicted_voxels_is_reported_once_and_again_when_it_is_lost_again():
    run = Validations()
    assert run.after(*[WITHOUT_2] * 4) == []  # a fifth of the run: too early
    (line,) = run.after(WITHOUT_2)
    assert line == f"step 5: {MISSING.format('5 validations')}"
    assert run.after(*[WITHOUT_2] * 5) == [line]
    assert run.after(GOOD, GOOD, WITHOUT_2, WITHOUT_2) == [line]
    (_, again) = run.after(WITHOUT_2)
    assert again == f"step 15: {MISSING.format('3 validations')}"
    assert run.warnings.warnings(done=False) == [MISSING.format("3 validations")]


def test_a_flat_loss_is_reported_once_unless_the_network_has_learned():
    lines = []
    for prediction in (torch.zeros_like(GOOD), GOOD):
        run = Validations()
        run.step(*[1.0] * 80)
        printed = run.after(*[prediction] * 8)
        lines.append([line for line in printed if "loss" in line])
    (line,), nothing = lines
    assert line.startswith("step 5: the loss does not fall: its median was 1 in the first eighth")
    assert nothing == []


def test_divergence_is_printed_once_and_not_reported_when_it_is_over():
    run = Validations()
    run.step(1.5, 70.0, 80.0, 90.0)
    run.after(GOOD, GOOD)
    assert run.lines == [
        "step 1: the training diverged: its loss rose from 1.5 to 80; " + LOWER_RATE
    ]
    run.step(1.4, 1.4, 1.4)
    assert len(run.after(GOOD)) == 1
    assert run.warnings.warnings(done=True, steps=3) == []


def test_a_run_that_had_learned_before_it_diverged_is_warned_about_but_does_not_fail():
    run = Validations()
    run.after(GOOD)
    run.step(0.1, 1e9, 1e9, 1e9)
    assert run.warnings.find_failure(steps=4, skipped=0) is None
    (warning,) = run.warnings.warnings(done=True, steps=4)
    assert warning == f"the training diverged: its loss rose from 0.1 to 1e+09; {LOWER_RATE}"


def test_more_is_suggested_of_what_a_run_has_and_the_network_knows(composed):
    settings = composed(
        "trainer.max_steps=9", "trainer.max_epochs=3", "trainer.max_time=00:00:10:00"
    )
    time, foreground = "trainer.max_time=00:00:20:00", "data.foreground_fraction=0.9"
    longer = f"trainer.max_steps=18 trainer.max_epochs=6 {time}"
    assert suggest_overrides(settings, "class") == [longer, foreground, "model.width=16"]
    assert suggest_overrides(settings, "class", out_of_time=True) == [time, foreground]
    assert suggest_overrides(settings, "loss") == ["optimizer.lr=0.0003", "optimizer.lr=0.03"]
    words = ["model=dynunet", "data.foreground_fraction=1", "trainer.max_steps=50"]
    assert suggest_overrides(composed(*words), "class") == ["trainer.max_steps=100"]


def draw_points(losses):
    curve = Curve()
    for step, loss in enumerate(losses):
        curve.add(step, loss)
    return curve.points


def add_noise(*values, amplitude=0.1):
    rng = random.Random(0)
    return [value + rng.uniform(-amplitude, amplitude) for value in values]


FALLING = [1.4 - 0.2 * n / 300 for n in range(300)]
SPIKES = {290: 60.0, 291: float("nan"), 295: float("inf")}


@pytest.mark.parametrize(
    ("losses", "plateau"),
    [
        ([1.0] * (MIN_POINTS - 1), None),  # too few steps to judge
        ([1.0] * MIN_POINTS, (1, 1)),
        ([-0.1] * 300, (-0.1, -0.1)),
        (add_noise(*[1.4] * 300), (1.4, 1.4)),
        (add_noise(*FALLING), None),
        ([SPIKES.get(n, 2 - n / 200) for n in range(300)], None),
    ],
    ids=["short", "constant", "negative", "noisy", "falling", "spikes"],
)
def test_a_loss_that_does_not_fall_is_detected_despite_noise(losses, plateau):
    found = detect_plateau(draw_points(losses))
    assert found == (None if plateau is None else pytest.approx(plateau, abs=0.1))


DIVERGING = [([1.5] + [1e15] * count, (1.5, 1e15)) for count in (3, 1000)]
OTHERS = [[], [1.5, 1.5, 60.0], [0.01] * 200 + [0.9] * 200, [-0.9] * 99 + [2.0], [900, 800, 90]]


@pytest.mark.parametrize(("losses", "rise"), DIVERGING + [(losses, None) for losses in OTHERS])
def test_a_spike_a_forgotten_task_and_a_high_loss_are_no_divergence(losses, rise):
    assert detect_divergence(draw_points(losses), min(losses, default=0.0)) == rise
