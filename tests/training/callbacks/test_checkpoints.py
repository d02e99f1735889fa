"""Checkpoints as a run writes them."""

from collections import deque

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.helpers.training import fit
from unet3d.checkpoint_file import load_checkpoint
from unet3d.commands.train import build_training
from unet3d.errors import UsageError
from unet3d.training.callbacks.checkpoints import AtomicCheckpointIO
from unet3d.training.start import prepare_start


def test_a_save_keeps_the_checkpoint_before_it(tmp_path):
    for step in range(3):
        AtomicCheckpointIO().save_checkpoint({"step": step}, tmp_path / "last.ckpt")
    kept = {p.name: torch.load(p, weights_only=True)["step"] for p in tmp_path.iterdir()}
    assert kept == {"last.ckpt": 2, "previous.ckpt": 1}


class Remember(Callback):
    """Save a state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


def test_a_state_that_could_not_be_read_again_is_refused_and_arrays_are_restored(
    composed, tmp_path
):
    options = ["fold=none", "trainer.max_steps=1", "resume=auto", "logger=none"]
    for value in (np.arange(3), np.zeros(2)):
        run = build_training(composed(*options), tmp_path)
        run.trainer.callbacks.append(Remember(value))
        fit(run, prepare_start(run).checkpoint)
        options[1] = "trainer.max_steps=2"
    np.testing.assert_array_equal(run.trainer.callbacks[-1].value, np.arange(3))
    options[1] = "trainer.max_steps=3"
    run = build_training(composed(*options), tmp_path)
    run.trainer.callbacks.append(Remember(deque([1])))
    message = r"^last.ckpt could not be read again: it holds a collections.deque, saved by Remember"
    with pytest.raises(UsageError, match=message):
        fit(run, None)
    assert load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 2


class Clip(Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.gradient_clip_val = 1e-6


def test_gradients_are_clipped_to_what_a_callback_sets(composed, tmp_path):
    words = ["trainer.max_steps=1", "fold=none", "logger=none", "optimizer=sgd"]
    weights = {}
    for name, more in (("option", ["trainer.gradient_clip_val=1e-6"]), ("callback", [])):
        run = build_training(composed(*words, *more), tmp_path / name)
        run.trainer.callbacks += [Clip()] if name == "callback" else []
        fit(run)
        weights[name] = run.module.model.state_dict()
    for key, value in weights["option"].items():
        assert torch.equal(value, weights["callback"][key]), key


@pytest.mark.parametrize("name", ["loss", "model"])
def test_a_part_that_the_step_has_cannot_be_replaced(composed, tmp_path, name):
    run = build_training(composed(), tmp_path)
    with pytest.raises(UsageError, match=f"replaces the {name} of the run: change its attributes"):
        setattr(run.module, name, torch.nn.Identity())


def test_a_run_saves_between_steps_and_not_between_micro_batches(composed, tmp_path):
    words = ["trainer.accumulate_grad_batches=2", "trainer.max_steps=3", "data.patches_per_case=3"]
    run, batches = build_training(composed("fold=none", *words), tmp_path), []
    progress = run.trainer.fit_loop.epoch_loop.batch_progress
    run.callbacks.last.is_due = lambda: True
    run.callbacks.last.save = lambda trainer: batches.append(progress.current.completed)
    run.trainer.fit(run.module, run.data.train_loader)
    assert batches == [2, 4, 6]
