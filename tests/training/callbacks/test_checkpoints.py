"""Checkpoints as a run writes them."""

import torch

from unet3d.commands.train import build_training
from unet3d.training.callbacks.checkpoints import AtomicCheckpointIO


def test_a_save_keeps_the_checkpoint_before_it(tmp_path):
    for step in range(3):
        AtomicCheckpointIO().save_checkpoint({"step": step}, tmp_path / "last.ckpt")
    kept = {p.name: torch.load(p, weights_only=True)["step"] for p in tmp_path.iterdir()}
    assert kept == {"last.ckpt": 2, "previous.ckpt": 1}


def test_a_run_saves_between_steps_and_not_between_micro_batches(composed, tmp_path):
    words = ["trainer.accumulate_grad_batches=2", "trainer.max_steps=3", "data.patches_per_case=3"]
    run, batches = build_training(composed("fold=none", *words), tmp_path), []
    progress = run.trainer.fit_loop.epoch_loop.batch_progress
    run.callbacks.last.is_due = lambda: True
    run.callbacks.last.save = lambda trainer: batches.append(progress.current.completed)
    run.trainer.fit(run.module, run.data.train_loader)
    assert batches == [2, 4, 6]
