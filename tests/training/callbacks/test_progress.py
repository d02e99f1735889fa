"""The estimated time left of a run, and its display."""

import re

import pytest

from unet3d.commands.train import build_training
from unet3d.training.callbacks.progress import ProgressBar, ProgressLines, TimeLeft


def estimate_after_epochs(time_left, *, validations, start=0.0):
    """Return the estimate after each of ten epochs: 10 s of steps, and 10 s of validation if any.

    The first step has taken a minute of warmup.
    """
    now, estimates = 60.0, []
    for epoch in range(10):
        for step in range(10):
            now += 1
            fractions = [start + (1 - start) * (10 * epoch + step + 1) / 100]
            time_left.record_step(now, fractions)
        if validations:
            now += 10
            time_left.record_validation(now, fractions)
        estimates.append(time_left.estimate_seconds(now, fractions))
    return estimates


def test_the_time_left_excludes_warmup_and_includes_validations():
    assert estimate_after_epochs(TimeLeft(), validations=False) == pytest.approx(
        range(90, -1, -10), abs=1e-6
    )
    with_validations = estimate_after_epochs(TimeLeft(), validations=True)
    assert with_validations == pytest.approx(range(180, -1, -20), abs=20)
    assert with_validations[-1] == 0


def test_a_resumed_run_is_estimated_by_the_speed_of_this_process():
    resumed = estimate_after_epochs(TimeLeft(), validations=False, start=0.9)
    assert resumed == pytest.approx(range(90, -1, -10), abs=1e-6)


def test_the_estimate_counts_down_until_the_next_validation_ends():
    time_left = TimeLeft()
    time_left.record_step(0, [0.0])
    time_left.record_step(5, [0.1])
    time_left.record_validation(20, [0.1])
    assert time_left.estimate_seconds(20, [0.1]) == pytest.approx(180)
    for now, done in ((21, 0.12), (25, 0.2), (35, 0.2)):
        assert time_left.estimate_seconds(now, [done]) == pytest.approx(200 - now)


def test_the_limit_that_is_reached_first_counts():
    time_left = TimeLeft()
    assert time_left.estimate_seconds(0, [0.5, 0.0]) is None
    time_left.record_step(0, [0.5, 0.0])
    assert time_left.estimate_seconds(0, [0.5, 0.0]) is None
    assert time_left.estimate_seconds(10, [0.6, 0.01]) == pytest.approx(40)
    assert time_left.estimate_seconds(10, [0.51, 0.2]) == pytest.approx(40)


@pytest.mark.parametrize(
    ("bar", "callback"),
    [("true", ProgressBar), ("false", ProgressLines), ("auto", ProgressLines)],  # no terminal
)
def test_a_run_shows_a_bar_or_prints_lines(composed, tmp_path, bar, callback):
    run = build_training(composed(f"trainer.enable_progress_bar={bar}"), tmp_path)
    (progress,) = (c for c in run.trainer.callbacks if isinstance(c, ProgressBar | ProgressLines))
    assert type(progress) is callback
    assert (run.trainer.progress_bar_callback is progress) == (callback is ProgressBar)
    assert run.trainer.progress_bar_callback in (progress, None)  # Lightning adds none


@pytest.mark.parametrize("fold", ["0", "none"])
def test_a_log_line_has_step_scores_and_time_left(unet3d, capsys, fold):
    limits = ["trainer.max_steps=null", "trainer.max_epochs=2"]
    assert unet3d(f"fold={fold}", *limits) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("epoch")]
    dice = r", Dice 0\.\d{4}" if fold == "0" else ""
    first, last = (rf"epoch {n}/2, step \d, loss \d\.\d{{4}}{dice}" for n in (1, 2))
    assert re.fullmatch(first + r", training ends in \d+ s", lines[0])
    assert re.fullmatch(last, lines[1])
    assert len(lines) == 2


def test_the_bar_shows_the_time_left_and_scores_before_memory(unet3d, capsys):
    assert unet3d("trainer.enable_progress_bar=true", "trainer.max_steps=4") == 0
    shown = re.split(r"[\r\n]", capsys.readouterr().out)
    rates = r"\[ *[\d.]+(?:it/s|s/it), loss=[\d.]+, dice=[\d.]+, peak_mib=\d+\]"
    line = rf"Epoch 2, training ends in \d+ s: \|.*\| 1/2 {rates}.*"
    assert [x for x in shown if re.fullmatch(line, x)], shown
