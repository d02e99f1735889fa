"""`unet3d lr`."""

import json

import pytest

from unet3d.cli.main import main


@pytest.fixture
def find(small, tmp_path, monkeypatch):
    """Run `unet3d lr` on the smallest run in an empty folder; return the exit code."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: main(["lr", *small, "steps=20", *words])


@pytest.mark.slow
def test_a_rate_is_suggested_and_nothing_of_the_run_is_kept(find, tmp_path, capsys):
    assert find() == 0
    assert "the loss falls fastest with optimizer.lr=" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_rates_rise_from_the_first_to_the_last(find, tmp_path):
    words = ["min_lr=1e-5", "max_lr=1e-2", "lr_factors={encoder:0.1}", "scheduler=one_cycle"]
    assert find(*words, "format=json", "output=lr.json") == 0
    curve = json.loads((tmp_path / "lr.json").read_text())
    assert curve["lr"][0] == pytest.approx(1e-5)
    assert curve["lr"][-1] == pytest.approx(1e-2)
    assert len(curve["loss"]) == len(curve["lr"]) == 20
    assert curve["suggestion"] in curve["lr"]


@pytest.mark.slow
def test_a_test_that_diverges_ends_early_with_its_curve(find, capsys):
    assert find("max_lr=1e30", "steps=60", "optimizer=sgd", "trainer.gradient_clip_val=null") == 0
    assert "; it diverges at " in capsys.readouterr().out


@pytest.mark.slow
def test_a_figure_is_written(find, tmp_path):
    assert find("format=png", "output=lr.png") == 0
    assert (tmp_path / "lr.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["min_lr=1", "max_lr=0.1"], "min_lr must be below max_lr, got 1 and 0.1"),
        (["steps=5"], "steps must be an int >= 20, got 5"),
        (["min_lr=0"], "min_lr must be"),
        (["format=png"], "format=png needs output=FILE.png"),
    ],
)
def test_a_wrong_range_is_refused(find, capsys, words, message):
    assert find(*words) == 2
    assert message in capsys.readouterr().err
