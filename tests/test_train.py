"""The application, end to end."""

import math
import os
import signal

import pytest
import torch

from tests.contract.helpers.runs import read_events, read_report
from unet3d.__main__ import main
from unet3d.checkpoint_file import load_checkpoint, save_checkpoint
from unet3d.commands.train import build_training
from unet3d.training.callbacks.step_records import StepTimer

pytestmark = pytest.mark.slow


def test_a_signal_after_the_last_step_puts_the_evaluation_off(unet3d, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(
            StepTimer,
            "on_train_end",
            lambda *_: os.kill(os.getpid(), signal.SIGTERM),
            raising=False,
        )
        assert unet3d("evaluation.enabled=true") == 143
    assert "Dice, mean" not in capsys.readouterr().out
    assert unet3d("evaluation.enabled=true", "resume=auto") == 0
    assert "Dice, mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["precision=bf16-true"],
        pytest.param(["precision=16-true", "trainer.accelerator=gpu"], marks=pytest.mark.gpu),
    ],
)
def test_pure_half_precision_trains_without_nan(composed, tmp_path, words):
    overrides = ["model.norm=batch", "trainer.max_steps=20", "fold=none"]
    run = build_training(composed(*words, *overrides), tmp_path)
    run.trainer.fit(run.module, run.data)
    model = run.module.model
    assert model.encoder[0].convs[0].conv.weight.dtype in (torch.bfloat16, torch.float16)
    assert model.encoder[0].convs[0].norm.running_mean.dtype == torch.float32
    assert all(p.isfinite().all() for p in model.parameters())
    losses = [s.value for s in read_events(tmp_path).Scalars("train/loss")]
    assert len(losses) == 20
    assert math.isfinite(sum(losses))
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.long
def test_the_default_run_learns_every_class(tmp_path, monkeypatch):
    """`make train`, but shorter, at a seed that missed a class before heads had a prior bias.

    Dice starts below 0.5 and ends above 0.8.
    """
    monkeypatch.chdir(tmp_path)
    overrides = ["seed=1", "trainer.max_epochs=12", "trainer.enable_progress_bar=false"]
    assert main(["train", *overrides, "hydra.run.dir=run", "trainer.accelerator=cpu"]) == 0
    report = read_report(tmp_path / "run")
    assert report["warnings"] == []
    for name in ("ball", "tube", "box"):
        assert report["metrics"][f"val/dice/{name}"] > 0.6
    dice = [s.value for s in read_events(tmp_path / "run").Scalars("val/dice")]
    assert dice[0] < 0.5
    assert dice[-1] > 0.8
    assert (tmp_path / "data" / "synthetic").is_dir()


def test_a_run_that_goes_on_in_a_new_folder_keeps_the_best_checkpoint(unet3d, tmp_path):
    words = ["evaluation.enabled=true", "callbacks.best_checkpoint.top_k=2"]
    assert unet3d(*words, "trainer.max_steps=4") == 0
    old = tmp_path / "run" / "checkpoints"
    content = load_checkpoint(old / "last.ckpt", mmap=False)
    scores = content["callbacks"]["BestCheckpoint"]["scores"]
    scores |= dict.fromkeys(scores, 2.0)  # no later one is better
    save_checkpoint(content, old / "last.ckpt")
    new = f"hydra.run.dir={tmp_path / 'new'}"
    assert unet3d(*words, "trainer.max_steps=6", f"resume={tmp_path / 'run'}", new) == 0
    copied = tmp_path / "new" / "checkpoints"
    for name in ("best.ckpt", *scores):
        assert (copied / name).read_bytes() == (old / name).read_bytes()
    evaluated = read_report(tmp_path / "new")["evaluation"]["checkpoint"]
    assert evaluated == str(copied / "best.ckpt")


def test_a_run_that_an_error_ends_within_no_grad_leaves_gradients_on(unet3d, monkeypatch):
    """Torch raises the error of a dead worker between any two instructions."""

    def end_within_no_grad(*_):
        torch.set_grad_enabled(False)
        raise RuntimeError("a worker is dead")

    monkeypatch.setattr(StepTimer, "on_train_end", end_within_no_grad, raising=False)
    assert unet3d() == 4
    assert torch.is_grad_enabled()
