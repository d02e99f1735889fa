"""Callbacks of the config group: early stopping, the best checkpoints, and a user's own."""

from math import nan

import lightning.pytorch as pl
import pytest
import torch

from tests.helpers.training import fit
from unet3d.commands.train import build_training
from unet3d.errors import UsageError
from unet3d.training.callbacks.stopping import EarlyStopping
from unet3d.training.checkpoints import AtomicCheckpointIO, BestCheckpoint, resolve_start
from unet3d.training.trainer import silence_lightning


class Scores(pl.LightningModule):
    """Validates with one given value after each step of one epoch."""

    def __init__(self, values, monitor):
        super().__init__()
        self.values, self.monitor = list(values), monitor
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        self.log(self.monitor, torch.tensor(self.values[self.global_step - 1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def validate(callback, values, monitor="val/dice"):
    """Train a step and validate for each value; return the trainer."""
    silence_lightning()
    loader = torch.utils.data.DataLoader(torch.zeros(len(values)))
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[callback],
        enable_checkpointing=isinstance(callback, BestCheckpoint),
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=1,
        num_sanity_val_steps=0,
        plugins=[AtomicCheckpointIO()],
        val_check_interval=1,
    )
    trainer.fit(Scores(values, monitor), loader, torch.utils.data.DataLoader(torch.zeros(1)))
    return trainer


def test_less_can_be_better_and_nan_never_is():
    callback = EarlyStopping(monitor="val/hd95_mm", mode="min", patience=2)
    values = [nan, 9.0, 8.0, nan, 8.0, 1.0]
    assert validate(callback, values, "val/hd95_mm").global_step == 5


def read_steps(folder):
    files = folder.iterdir()
    return {p.name: torch.load(p, weights_only=True)["global_step"] for p in files}


def test_the_best_checkpoints_are_kept_also_after_a_resume_by_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    callback = BestCheckpoint(tmp_path / "real", top_k=2)
    validate(callback, [0.1, 0.4, nan, 0.2, 0.3])
    names = {"best.ckpt": 2, "best-step=000002.ckpt": 2, "best-step=000005.ckpt": 5}
    assert read_steps(tmp_path / "real") == names
    resumed = BestCheckpoint(tmp_path / "link", top_k=2)
    resumed.load_state_dict(callback.state_dict())
    validate(resumed, [0.1, 0.25])
    assert read_steps(tmp_path / "real") == names
    validate(resumed, [0.5])
    assert read_steps(tmp_path / "real")["best.ckpt"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["callbacks.early_stopping.patience=0"], "^callbacks.early_stopping"),
        (["callbacks.best_checkpoint.mode=up"], "^callbacks.best_checkpoint"),
        (["fold=none"], "early_stopping needs validation cases, fold=none has"),
    ],
)
def test_invalid_options_are_named(composed, tmp_path, words, message):
    with pytest.raises(UsageError, match=message):
        build_training(composed("callbacks=[default,early_stopping]", *words), tmp_path)


def test_a_run_that_stopped_early_is_finished_unless_it_gets_more_patience(composed, tmp_path):
    words = ["callbacks=[default,early_stopping]", "callbacks.early_stopping.min_delta=1"]
    words += ["trainer.max_steps=60", "resume=auto"]
    for patience, is_finished in ((1, True), (2, False)):
        option = f"callbacks.early_stopping.patience={patience}"
        run = build_training(composed(*words, option), tmp_path)
        if not (tmp_path / "checkpoints").exists():
            fit(run)
            run = build_training(composed(*words, option), tmp_path)
        assert resolve_start(run).is_finished is is_finished


@pytest.mark.parametrize(
    "words",
    [
        ["callbacks.best_checkpoint.monitor=val/dise"],
        ["callbacks=[early_stopping]", "callbacks.early_stopping.monitor=val/dise"],
        ["scheduler=plateau", "scheduler.monitor=val/dise"],
    ],
    ids=lambda words: words[-1].split("=")[0],
)
def test_a_metric_that_does_not_exist_is_named_with_those_that_do(composed, tmp_path, words):
    run = build_training(composed(*words), tmp_path)
    with pytest.raises(UsageError, match=r"val/dise.* '?val/dice'?, "):
        fit(run)
