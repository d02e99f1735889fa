"""The estimated time left of a run, and its display."""

import re
import time
from types import SimpleNamespace

import pytest

from unet3d.training.callbacks.progress import TimeLeft


@pytest.mark.parametrize("start", [0.0, 0.5])  # a resumed run has the speed of this process
def test_the_time_left_excludes_the_first_step(monkeypatch, start):
    now = 60.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    time_left = TimeLeft(SimpleNamespace(fraction_done=lambda done: done))
    assert time_left.describe(start) == ""
    now += 10
    assert time_left.describe(start) == ""  # a batch that only accumulates
    now += 10
    assert time_left.describe(start + 0.1) == (
        f", training ends in {'03:00' if start == 0 else '01:20'}"
    )
    assert time_left.describe(1.0) == ""


@pytest.mark.parametrize("fold", ["0", "none"])
def test_a_log_line_has_step_scores_and_time_left(unet3d, capsys, fold):
    limits = ["trainer.max_steps=null", "trainer.max_epochs=2"]
    assert unet3d(f"fold={fold}", *limits) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("epoch")]
    dice = r", Dice 0\.\d{4}" if fold == "0" else ""
    first, last = (rf"epoch {n}/2, step \d, loss \d\.\d{{4}}{dice}" for n in (1, 2))
    assert re.fullmatch(first + r", training ends in \d\d:\d\d", lines[0])
    assert re.fullmatch(last, lines[1])
    assert len(lines) == 2


@pytest.mark.slow
def test_the_bar_shows_the_time_left_and_scores_before_memory(unet3d, capsys):
    assert unet3d("trainer.enable_progress_bar=true", "trainer.max_steps=4") == 0
    shown = re.split(r"[\r\n]", capsys.readouterr().out)
    rates = r"\[ *[\d.]+(?:it/s|s/it), loss=[\d.]+, dice=[\d.]+, peak_mib=\d+\]"
    line = rf"Epoch 2, training ends in \d\d:\d\d: \|.*\| 1/2 {rates}.*"
    assert [x for x in shown if re.fullmatch(line, x)], shown
    kept = r"epoch \d, step (\d)/4, loss \d\.\d{4}, Dice \d\.\d{4}"
    steps = [found[1] for x in shown if (found := re.fullmatch(kept, x.strip()))]
    assert steps == ["2", "4"]  # a line per validation stays above the bar
