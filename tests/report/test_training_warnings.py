import random

import pytest

from unet3d.report.training_warnings import (
    PARTS,
    LossHistory,
    detect_late_rise,
    find_absent_classes,
)


def make_history(losses):
    history = LossHistory()
    for step, loss in enumerate(losses):
        history.add(step, loss)
    return history


def add_noise(*values, amplitude=0.1):
    rng = random.Random(0)
    return [value + rng.uniform(-amplitude, amplitude) for value in values]


def test_a_noisy_loss_is_a_plateau_unless_it_falls():
    plateau = make_history(add_noise(*[1.4] * 300)).detect_plateau()
    assert plateau == pytest.approx((1.4, 1.4), abs=0.1)
    falling = [1.4 - 0.2 * n / 300 for n in range(300)]
    assert make_history(add_noise(*falling)).detect_plateau() is None


def test_spikes_and_non_finite_losses_do_not_hide_a_falling_loss():
    losses = [2 - n / 200 for n in range(300)]
    losses[290], losses[291], losses[295] = 60.0, float("nan"), float("inf")
    assert make_history(losses).detect_plateau() is None


@pytest.mark.parametrize(
    "losses",
    [[], [1.5, 1.5, 60.0], [0.01] * 200 + [0.9] * 200, [-0.9] * 99 + [2.0], [900, 800, 90]],
)
def test_a_spike_a_forgotten_task_and_a_high_loss_are_no_divergence(losses):
    assert make_history(losses).detect_divergence() is None


@pytest.mark.parametrize("count", [3, 1000])
def test_a_loss_that_diverges_in_the_first_step_is_detected_however_long_the_run(count):
    assert make_history([1.5] + [1e15] * count).detect_divergence() == (1.5, 1e15)


def test_a_few_steps_are_too_few_to_judge_the_loss():
    assert make_history([1.0] * (PARTS - 1)).detect_plateau() is None
    assert make_history([1.0] * PARTS).detect_plateau() == (1, 1)


RISING = [n / 20 for n in range(20)]
SETTLED = [0.34, 0.44, 0.50, 0.81, 0.84, 0.88, 0.90, 0.91, 0.90, 0.89, 0.89, 0.91, 0.91]
GROWING_NOISE = [*[0.1] * 12, 0.2, 0.3, 0.1, 0.4, 0.2, 0.5]


def test_dice_that_rises_to_the_end_returns_its_medians():
    nan = float("nan")  # ignored
    assert detect_late_rise([nan, *RISING, nan]) == pytest.approx((0.675, 0.925))


@pytest.mark.parametrize("dice", [SETTLED, RISING[:7], GROWING_NOISE])
def test_settled_or_noisy_dice_is_not_still_rising(dice):
    assert detect_late_rise(dice) is None


CLASSES = {"organ": [1], "tumor": [2], "whole": [1, 2]}


@pytest.mark.parametrize(
    ("training", "validation", "starts"),
    [
        ([{1}, {2}], [{1, 2}], []),
        ([{1}], [{2}], ["no training case has tumor", "no validation case has organ, so its Dice"]),
        ([{1}], [{1}], ["no case has tumor, so it cannot be learned"]),
        ([set()], [], ["no case has organ, tumor, whole"]),
    ],
)
def test_absent_classes_are_named_and_any_label_of_a_region_counts(training, validation, starts):
    warnings = find_absent_classes(CLASSES, training, validation)
    assert len(warnings) == len(starts)
    assert all(text.startswith(start) for text, start in zip(warnings, starts, strict=True))
