"""Callbacks of the config group: early stopping, the best checkpoints, and a user's own."""

import random
from math import nan

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler

from tests.contract.helpers.runs import read_step
from tests.helpers.training import GiveDistances, fit
from unet3d.checkpoint_file import load_checkpoint
from unet3d.commands.train import build_training
from unet3d.errors import UsageError
from unet3d.training.start import prepare_start

pytestmark = pytest.mark.slow

EPOCHS_OF_ONE_STEP = ["data.batch_size=4", "trainer.num_sanity_val_steps=0", "logger=none"]


@pytest.fixture
def validate(composed):
    """Train a run whose validations after each step have these distances."""

    def train(folder, distances, *words):
        run = build_training(composed(*EPOCHS_OF_ONE_STEP, *words), folder)
        run.trainer.callbacks.insert(0, GiveDistances(*distances))
        fit(run, prepare_start(run).checkpoint)
        return run.trainer

    return train


def test_less_can_be_better_and_nan_never_is(validate, tmp_path):
    key = "callbacks.early_stopping"
    words = ["callbacks=early_stopping", f"{key}.monitor=val/hd95_mm", f"{key}.mode=min"]
    words += [f"{key}.patience=2", "trainer.max_steps=9"]
    assert validate(tmp_path, [nan, 9.0, 8.0, nan, 8.0, 1.0], *words).global_step == 5


@pytest.mark.parametrize("monitor", ["val/hd95_mm", "val/loss", "val/volume_error/ball"])
@pytest.mark.parametrize(
    "words",
    [
        ["callbacks.best_checkpoint"],
        ["callbacks.early_stopping", "callbacks=early_stopping"],
        ["scheduler", "scheduler=plateau"],
    ],
)
def test_the_highest_value_of_what_is_better_lower_is_refused(composed, tmp_path, words, monitor):
    key, *chosen = words
    with pytest.raises(UsageError, match=f"lower values of {monitor} are better: set {key}.mode"):
        build_training(composed(*chosen, f"{key}.monitor={monitor}"), tmp_path)
    build_training(composed(*chosen, f"{key}.monitor={monitor}", f"{key}.mode=min"), tmp_path)


def test_the_best_checkpoints_are_kept_also_after_a_resume_by_a_link(validate, tmp_path):
    key, real = "callbacks.best_checkpoint", tmp_path / "real"
    words = [f"{key}.monitor=val/hd95_mm", f"{key}.mode=min", f"{key}.top_k=2", "resume=auto"]
    (tmp_path / "link").symlink_to(real)

    def read_best():
        return {path.name: read_step(path) for path in (real / "checkpoints").glob("best*")}

    validate(real, [0.9, 0.6, nan, 0.8, 0.7], *words, "trainer.max_steps=5")
    expected = {"best.ckpt": 2, "best-step=000002.ckpt": 2, "best-step=000005.ckpt": 5}
    assert read_best() == expected
    validate(tmp_path / "link", [0.9, 0.75], *words, "trainer.max_steps=7")
    assert read_best() == expected
    validate(tmp_path / "link", [0.5], *words, "trainer.max_steps=8")
    assert read_best()["best.ckpt"] == 8


def test_a_resumed_run_may_keep_more_or_fewer_of_the_best_checkpoints(validate, tmp_path):
    def resume(distances, top_k, steps):
        key = "callbacks.best_checkpoint"
        words = [f"{key}.monitor=val/hd95_mm", f"{key}.mode=min", f"{key}.top_k={top_k}"]
        validate(tmp_path, distances, *words, "resume=auto", f"trainer.max_steps={steps}")
        paths = sorted((tmp_path / "checkpoints").glob("best*"))
        return {path.stem.removeprefix("best-step="): read_step(path) for path in paths}

    assert resume([0.9, 0.6, 0.7], 1, 3) == {"best": 2}
    assert resume([0.8, 0.9], 2, 5) == {"best": 2, "000002": 2, "000004": 4}
    assert resume([0.7], 2, 6) == {"best": 2, "000002": 2, "000006": 6}
    assert resume([0.65], 1, 7)["best"] == 2
    assert resume([0.5], 1, 8)["best"] == 8


def test_early_stopping_needs_validation(composed, tmp_path):
    words = ["callbacks=[default,early_stopping]", "fold=none"]
    with pytest.raises(UsageError, match="early_stopping needs validation cases, fold=none has"):
        build_training(composed(*words), tmp_path)


def test_a_run_that_stopped_early_is_finished_unless_it_gets_more_patience(composed, tmp_path):
    words = ["callbacks=[default,early_stopping]", "callbacks.early_stopping.min_delta=1"]
    words += ["trainer.max_steps=60", "resume=auto"]
    for patience, is_finished in ((1, True), (2, False)):
        option = f"callbacks.early_stopping.patience={patience}"
        run = build_training(composed(*words, option), tmp_path)
        if not (tmp_path / "checkpoints").exists():
            fit(run)
            run = build_training(composed(*words, option), tmp_path)
        assert prepare_start(run).is_finished is is_finished


def test_a_run_that_may_stop_at_the_first_bad_validation_goes_on_before_one(composed, tmp_path):
    words = ["callbacks=[default,early_stopping]", "callbacks.early_stopping.patience=0"]
    fit(build_training(composed(*words, "trainer.max_steps=1"), tmp_path))
    run = build_training(composed(*words, "trainer.max_steps=9", "resume=auto"), tmp_path)
    assert not prepare_start(run).is_finished


RATE = ["scheduler=constant", "scheduler.warmup=0"]  # whatever the number of steps


class FreezeInFirstEpoch(Callback):
    """Let the first parameters learn from the second epoch on."""

    def on_train_epoch_start(self, trainer, pl_module):
        next(pl_module.parameters()).requires_grad_(trainer.current_epoch > 0)


class DrawNumbers(Callback):
    """Change the weights by numbers of Python and of NumPy."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        with torch.no_grad():
            next(pl_module.parameters()).add_(0.1 * random.random() + 0.1 * np.random.rand())


class WeightLoss(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.loss.alpha = np.float64(0.1 + 0.7 * trainer.current_epoch)


class ChangeNetwork(Callback):
    """Set attributes of the network as an epoch begins, and keep a norm as it is."""

    def on_train_epoch_start(self, trainer, pl_module):
        norms = [m for m in pl_module.model.modules() if isinstance(m, torch.nn.BatchNorm3d)]
        for norm in norms:
            norm.momentum = 0.1 + 0.2 * trainer.current_epoch
        norms[1].train(trainer.current_epoch == 1)


class ClipMore(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        trainer.gradient_clip_val = np.float64(0.001 * (1 + trainer.current_epoch))


@pytest.mark.parametrize(
    "make",
    [
        *(FreezeInFirstEpoch, DrawNumbers, WeightLoss, ChangeNetwork, ClipMore),
        lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
    ],
    ids=["freeze", "random numbers", "weight of the loss", "network", "clipping", "accumulation"],
)
@pytest.mark.filterwarnings("ignore:When using `Trainer.accumulate_grad_batches")
def test_a_run_resumed_within_an_epoch_is_as_its_callbacks_had_set_it(composed, tmp_path, make):
    words = ["data.layout.num_cases=10", "data.num_workers=0", "logger=none", "data.batch_size=1"]
    words += ["loss=tversky", "model.norm=batch"]
    weights = {}
    for folder, limits in (("whole", [14]), ("resumed", [3, 11, 14])):
        for limit in limits:
            options = [*words, f"trainer.max_steps={limit}", "resume=auto", *RATE]
            run = build_training(composed(*options), tmp_path / folder)
            run.trainer.callbacks.append(make())
            fit(run, prepare_start(run).checkpoint)
        content = load_checkpoint(tmp_path / folder / "checkpoints" / "last.ckpt")
        weights[folder] = content["state_dict"]
    for name, value in weights["whole"].items():
        assert torch.equal(value, weights["resumed"][name]), name


@pytest.mark.parametrize(
    "words",
    [
        ["callbacks.best_checkpoint.monitor=val/dise"],
        ["scheduler=plateau", "scheduler.monitor=val/dise"],
    ],
    ids=lambda words: words[-1].split("=")[0],
)
def test_a_metric_that_does_not_exist_is_named_with_those_that_do(composed, tmp_path, words):
    run = build_training(composed(*words), tmp_path)
    with pytest.raises(UsageError, match=r"val/dise.* '?val/dice'?, "):
        fit(run)


def test_a_finished_run_with_lightnings_average_goes_on_from_its_own_weights(composed, tmp_path):
    key = "+callbacks.ema={_target_:lightning.pytorch.callbacks.EMAWeightAveraging,decay:0.8}"
    words = [key, "data.layout.num_cases=8", "data.num_workers=0", "logger=none"]
    weights = {}
    for folder, limits in (("whole", [4]), ("extended", [2, 4])):
        for limit in limits:
            options = [*words, f"trainer.max_steps={limit}", "resume=auto", "scheduler=constant"]
            run = build_training(composed(*options), tmp_path / folder)
            fit(run, prepare_start(run).checkpoint)
        content = load_checkpoint(tmp_path / folder / "checkpoints" / "last.ckpt")
        weights[folder] = content["current_model_state"]
    assert weights["whole"].keys() == weights["extended"].keys()
    for name, value in weights["whole"].items():
        assert torch.equal(value, weights["extended"][name]), name


def test_an_average_that_is_not_in_the_best_checkpoint_is_refused(composed, tmp_path):
    kind = "lightning.pytorch.callbacks.StochasticWeightAveraging"
    with pytest.raises(UsageError, match="use ema_decay="):
        build_training(composed(f"+callbacks.swa={{_target_:{kind},swa_lrs:0.1}}"), tmp_path)


class TwoLosses(torch.optim.SGD):
    """Compute the loss twice in a step, as SAM does."""

    def step(self, closure):
        closure()
        return super().step(closure)


class NoLoss(torch.optim.SGD):
    """Change the weights by gradients that nobody has checked."""

    def step(self, closure):
        return super().step()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (TwoLosses, "TwoLosses computes the loss more than once in a step"),
        (NoLoss, r"NoLoss\.step\(closure\) must call the closure first"),
    ],
)
def test_an_optimizer_that_does_not_compute_the_loss_once_is_refused(
    composed, tmp_path, kind, problem
):
    run = build_training(composed("trainer.max_steps=1"), tmp_path)
    build = run.module.optimizer
    run.module.optimizer = lambda: kind(build().param_groups, lr=0.1)
    with pytest.raises(UsageError, match=problem):
        fit(run)
