"""`unet3d lr`."""

import pytest

from unet3d.__main__ import main


@pytest.mark.slow
def test_a_test_that_diverges_ends_early_and_nothing_of_the_run_is_kept(
    small, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = ["max_lr=1e30", "steps=60", "optimizer=sgd", "trainer.gradient_clip_val=null"]
    assert main(["lr", *small, *words]) == 0
    shown = capsys.readouterr().out
    assert "the loss falls fastest with optimizer.lr=" in shown
    assert "; it diverges at " in shown
    assert list(tmp_path.iterdir()) == []
