"""`unet3d lr`."""

import pytest

from unet3d.__main__ import main


@pytest.fixture
def find(small, tmp_path, monkeypatch):
    """Run `unet3d lr` on the smallest run in an empty folder; return the exit code."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: main(["lr", *small, "steps=20", *words])


@pytest.mark.slow
def test_a_test_that_diverges_ends_early_and_nothing_of_the_run_is_kept(find, tmp_path, capsys):
    assert find("max_lr=1e30", "steps=60", "optimizer=sgd", "trainer.gradient_clip_val=null") == 0
    shown = capsys.readouterr().out
    assert "the loss falls fastest with optimizer.lr=" in shown
    assert "; it diverges at " in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_figure_is_written(find, tmp_path):
    assert find("format=png", "output=lr.png") == 0
    assert (tmp_path / "lr.png").read_bytes()[:4] == b"\x89PNG"
