"""The time left of a run, and what is said of it."""

import re

import pytest

from unet3d.lit.callbacks.progress import ProgressBar, ProgressLines, TimeLeft
from unet3d.workflows.training.build import build_training


def lefts(left, *, validations, begun=0.0):
    """The estimate after each of ten epochs of ten steps and a validation: 20 seconds each.

    The first step has warmed up for a minute.
    """
    now, found = 60.0, []
    for epoch in range(10):
        for step in range(10):
            now += 1
            fractions = [begun + (1 - begun) * (10 * epoch + step + 1) / 100]
            left.step(now, fractions)
        if validations:
            now += 10
            left.validated(now, fractions)
        found.append(left.seconds(now, fractions))
    return found


def test_the_time_left_leaves_out_the_warm_up_and_counts_validations():
    assert lefts(TimeLeft(), validations=False) == pytest.approx(range(90, -1, -10), abs=1e-6)
    with_validations = lefts(TimeLeft(), validations=True)
    assert with_validations == pytest.approx(range(180, -1, -20), abs=20)
    assert with_validations[-1] == 0


def test_a_resumed_run_is_judged_by_what_this_process_did():
    resumed = lefts(TimeLeft(), validations=False, begun=0.9)
    assert resumed == pytest.approx(range(90, -1, -10), abs=1e-6)


def test_the_estimate_just_runs_down_until_the_next_validation_ends():
    left = TimeLeft()
    left.step(0, [0.0])
    left.step(5, [0.1])
    left.validated(20, [0.1])
    assert left.seconds(20, [0.1]) == pytest.approx(180)
    for now, done in ((21, 0.12), (25, 0.2), (35, 0.2)):
        assert left.seconds(now, [done]) == pytest.approx(200 - now)


def test_the_limit_that_is_reached_first_counts():
    left = TimeLeft()
    assert left.seconds(0, [0.5, 0.0]) is None
    left.step(0, [0.5, 0.0])
    assert left.seconds(0, [0.5, 0.0]) is None
    assert left.seconds(10, [0.6, 0.01]) == pytest.approx(40)
    assert left.seconds(10, [0.51, 0.2]) == pytest.approx(40)


@pytest.mark.parametrize(("bar", "callback"), [("true", ProgressBar), ("false", ProgressLines)])
def test_there_is_a_bar_or_there_are_lines(composed, tmp_path, bar, callback):
    run = build_training(composed(f"trainer.enable_progress_bar={bar}"), tmp_path)
    (shown,) = (c for c in run.trainer.callbacks if isinstance(c, ProgressBar | ProgressLines))
    assert type(shown) is callback


@pytest.mark.parametrize("fold", ["0", "none"])
def test_a_log_has_a_line_now_and_then_with_steps_scores_and_the_time_left(unet3d, capsys, fold):
    limits = ["trainer.max_steps=null", "trainer.max_epochs=2"]
    assert unet3d(f"fold={fold}", *limits) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("epoch")]
    dice = r", Dice 0\.\d{4}" if fold == "0" else ""
    first, last = (rf"epoch {n}/2, step \d, loss \d\.\d{{4}}{dice}" for n in (1, 2))
    assert re.fullmatch(first + r", training ends in \d+ s", lines[0])
    assert re.fullmatch(last, lines[1])
    assert len(lines) == 2


def test_the_bar_says_when_training_ends_and_has_scores_before_memory(unet3d, capsys):
    assert unet3d("trainer.enable_progress_bar=true", "trainer.max_steps=4") == 0
    shown = re.split(r"[\r\n]", capsys.readouterr().out)
    rates = r"\[ *[\d.]+(?:it/s|s/it), loss=[\d.]+, dice=[\d.]+, peak_mib=\d+\]"
    line = rf"Epoch 2, training ends in \d+ s: \|.*\| 1/2 {rates}.*"
    assert [x for x in shown if re.fullmatch(line, x)], shown
