"""Checkpoints as a run writes them."""

import torch

from unet3d.training.callbacks.checkpoints import AtomicCheckpointIO


def test_a_save_keeps_the_checkpoint_before_it(tmp_path):
    for step in range(3):
        AtomicCheckpointIO().save_checkpoint({"step": step}, tmp_path / "last.ckpt")
    kept = {p.name: torch.load(p, weights_only=True)["step"] for p in tmp_path.iterdir()}
    assert kept == {"last.ckpt": 2, "previous.ckpt": 1}
