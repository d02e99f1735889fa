import random

import pytest

from unet3d.report.diagnosis import (
    PARTS,
    LossHistory,
    Remedies,
    absent_classes,
    ended_rising,
    loss_stays,
    low_dice,
    never_predicted,
    still_rising,
)


def history(losses):
    found = LossHistory()
    for loss in losses:
        found.add(loss)
    return found


def noisy(*values, scatter=0.1):
    draw = random.Random(0)
    return [value + draw.uniform(-scatter, scatter) for value in values]


def test_a_loss_that_scatters_around_its_first_values_stays():
    first, last = history(noisy(*[1.4] * 300)).stays()
    assert first == pytest.approx(1.4, abs=0.1)
    assert last == pytest.approx(1.4, abs=0.1)


@pytest.mark.parametrize("end", [1.2, 0.1], ids=["a little", "much"])
def test_a_loss_that_falls_does_not_stay_whatever_its_scatter(end):
    falling = [1.4 + (end - 1.4) * n / 300 for n in range(300)]
    assert history(noisy(*falling)).stays() is None


def test_a_negative_loss_falls_away_from_zero():
    assert history([-0.1 - n / 300 for n in range(300)]).stays() is None
    assert history([-0.1] * 300).stays() == pytest.approx((-0.1, -0.1))


def test_spikes_and_losses_that_are_not_finite_do_not_make_a_loss_stay():
    losses = [2 - n / 200 for n in range(300)]
    losses[290], losses[291], losses[295] = 60.0, float("nan"), float("inf")
    assert history(losses).stays() is None


def test_nothing_is_said_of_a_handful_of_steps():
    assert history([1.0] * (PARTS - 1)).stays() is None
    assert history([1.0] * PARTS).stays() == (1, 1)


def test_a_loss_history_stays_small_and_goes_on_from_its_state():
    losses = noisy(*[1.0] * 10_000)
    whole, begun = history(losses), history(losses[:5_003])
    assert len(whole.means) < PARTS
    assert sum(whole.means) / len(whole.means) == pytest.approx(1, abs=0.01)
    resumed = LossHistory()
    resumed.load_state_dict(begun.state_dict())
    for loss in losses[5_003:]:
        resumed.add(loss)
    assert resumed.state_dict() == whole.state_dict()


RISING = [n / 20 for n in range(20)]
DEFAULT_JOB = [0.34, 0.44, 0.50, 0.50, 0.81, 0.84, 0.85, 0.84, 0.88, 0.90, 0.91, 0.90]
DEFAULT_JOB += [0.90, 0.90, 0.89, 0.89, 0.91, 0.91, 0.91, 0.91]


def test_dice_that_rises_to_the_end_is_told_by_its_medians():
    assert still_rising(RISING) == pytest.approx((0.675, 0.925))


@pytest.mark.parametrize(
    "dice",
    [
        DEFAULT_JOB,
        RISING[:7],
        [0.5, 0.4, 0.6, 0.3] * 5,
        [*[0.1] * 12, 0.2, 0.3, 0.1, 0.4, 0.2, 0.5],
    ],
    ids=["the default job", "few validations", "scatter", "scatter that grows"],
)
def test_dice_that_has_settled_or_scatters_is_not_still_rising(dice):
    assert still_rising(dice) is None


def test_validations_without_a_dice_do_not_count():
    assert still_rising([float("nan"), *RISING, float("nan")]) == still_rising(RISING)


CLASSES = {"organ": [1], "tumor": [2], "whole": [1, 2]}


@pytest.mark.parametrize(
    ("training", "validation", "said"),
    [
        ([{1}, {2}], [{1, 2}], []),
        ([{1}, {1, 2}], [{1}], ["no validation case has tumor, so its Dice is not known"]),
        ([{1}], [{2}], ["no training case has tumor", "no validation case has organ"]),
        ([{1}], [{1}], ["no case has tumor, so it cannot be learned"]),
        ([{1}], [], ["no case has tumor"]),
        ([set()], [set()], ["no case has organ, tumor, whole"]),
    ],
)
def test_classes_that_no_case_has_are_named_and_regions_count_by_any_label(
    training, validation, said
):
    found = absent_classes(CLASSES, training, validation)
    assert len(found) == len(said)
    assert all(sentence.startswith(start) for sentence, start in zip(found, said, strict=True))


def test_sentences_end_with_overrides_to_try():
    remedies = Remedies(
        run_too_short=["trainer.max_epochs=40"],
        class_not_learned=["trainer.max_epochs=40", "model.width=16"],
        loss_not_falling=["optimizer.lr=0.1", "optimizer.lr=10"],
    )
    assert never_predicted({"a": 1, "b": 7}, remedies) == (
        "not one voxel of the validation set is predicted as a (for 1 validation), b (for 7 "
        "validations); try trainer.max_epochs=40 or model.width=16"
    )
    assert low_dice(["a"], remedies) == (
        "Dice is below 0.05 for a; try trainer.max_epochs=40 or model.width=16"
    )
    assert ended_rising(0.5, 0.6, remedies) == (
        "the run ended while Dice was still rising: 0.500 at three quarters of it, 0.600 at its "
        "end; try trainer.max_epochs=40"
    )
    assert loss_stays(1.5, 1.5, remedies).endswith(
        "1.5 in the last; try optimizer.lr=0.1 or optimizer.lr=10"
    )
