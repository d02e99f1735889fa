"""Callbacks of the config group: early stopping, the best checkpoints, and a user's own."""

import pytest
import torch

from tests.lit.test_resume import At, crash, train
from unet3d.checkpoint_file import load_checkpoint
from unet3d.cli.train import build_training
from unet3d.errors import UsageError
from unet3d.lit.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from unet3d.lit.callbacks.early_stopping import EarlyStopping
from unet3d.workflows.training.run import resolve_start

LONG = ["data.layout.num_cases=8", "trainer.max_steps=60", "data.num_workers=0", "resume=auto"]
STOPPING = [*LONG, "callbacks=[default,early_stopping]", "callbacks.early_stopping.min_delta=1"]


class StandIn:
    """What a callback reads of a trainer and of a module."""

    is_global_zero, sanity_checking, should_stop, loggers = True, False, False, ()
    checkpoint_io = None

    def __init__(self):
        self.callback_metrics, self.global_step, self.saved = {}, 0, []
        self.strategy = self

    def print(self, line):
        self.line = line


def validate(callback, values, trainer=None, monitor="val/dice"):
    trainer = trainer or StandIn()
    for value in values:
        trainer.global_step += 10
        trainer.callback_metrics[monitor] = torch.tensor(value)
        callback.on_validation_end(trainer, trainer)
    return trainer


def test_a_run_stops_after_as_many_validations_without_improvement():
    callback = EarlyStopping(patience=2, min_delta=0.01)
    trainer = validate(callback, [0.1, 0.2, 0.205])
    assert not trainer.should_stop
    validate(callback, [0.2], trainer)
    assert trainer.should_stop
    assert trainer.line == "stopping early: val/dice was not better than 0.2 in 2 validations"


def test_less_can_be_better_and_nan_never_is():
    callback = EarlyStopping(monitor="val/hd95_mm", mode="min", patience=2)
    trainer = validate(callback, [float("nan"), 9.0, 8.0], monitor="val/hd95_mm")
    assert (callback.best, callback.bad_validations) == (8.0, 0)
    validate(callback, [float("nan"), 8.0], trainer, "val/hd95_mm")
    assert trainer.should_stop


@pytest.fixture
def best(tmp_path, monkeypatch):
    """Return a function that builds a BestCheckpoint which writes the step of the trainer."""

    def write(trainer, path):
        path.write_text(str(trainer.global_step))

    monkeypatch.setattr("unet3d.lit.callbacks.checkpoints.write_checkpoint", write)
    return lambda **options: BestCheckpoint(tmp_path, **options)


def list_files(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_best_checkpoints_are_kept(best, tmp_path):
    callback = best(top_k=2)
    validate(callback, [0.1, 0.4, 0.2, 0.3])
    assert list_files(tmp_path) == {
        "best.ckpt": "20",
        "best-step=000020.ckpt": "20",
        "best-step=000040.ckpt": "40",
    }
    resumed = best(top_k=2)
    resumed.load_state_dict(callback.state_dict())
    trainer = StandIn()
    trainer.global_step = 40
    validate(resumed, [0.35, 0.5], trainer)
    assert sorted(list_files(tmp_path).values()) == ["20", "60", "60"]


def test_a_validation_that_is_repeated_after_a_kill_changes_nothing(best, tmp_path):
    callback = best(top_k=2)
    trainer = validate(callback, [0.3, 0.4])
    state = callback.state_dict()
    validate(callback, [0.5], trainer)
    before = list_files(tmp_path)
    resumed = best(top_k=2)
    resumed.load_state_dict(state)
    trainer.global_step -= 10
    validate(resumed, [0.5], trainer)
    assert list_files(tmp_path) == before


def test_a_run_that_saved_no_ranking_keeps_its_best_checkpoint(best, tmp_path):
    resumed = best()
    resumed.load_state_dict({"best": 0.5})
    trainer = validate(resumed, [0.4])
    assert list_files(tmp_path) == {}
    validate(resumed, [0.6], trainer)
    assert list_files(tmp_path) == {"best.ckpt": "20"}


def test_a_metric_that_is_never_a_number_stops_the_run():
    assert validate(EarlyStopping(patience=2), [float("nan")] * 2).should_stop


def test_the_best_checkpoint_may_be_that_of_the_smallest_value(best, tmp_path):
    validate(best(monitor="val/hd95_mm", mode="min"), [3.0, 2.0, 5.0], monitor="val/hd95_mm")
    assert list_files(tmp_path) == {"best.ckpt": "20"}


@pytest.mark.parametrize(
    "build", [lambda: EarlyStopping(patience=0), lambda: EarlyStopping(mode="up")]
)
def test_invalid_options_are_an_error(build):
    with pytest.raises(UsageError):
        build()


def test_an_unknown_metric_is_named(composed, tmp_path):
    for name in ("val/dise", "dise"):
        with pytest.raises(UsageError, match=r"best_checkpoint\.monitor must be one of val/dice, "):
            build_training(composed(f"callbacks.best_checkpoint.monitor={name}"), tmp_path)
    run = build_training(composed("callbacks.best_checkpoint.monitor=train/dise"), tmp_path)
    with pytest.raises(UsageError, match="no metric train/dise; a validation logs val/dice, "):
        run.trainer.fit(run.module, run.data)


def test_early_stopping_without_validation_cases_is_refused(composed, tmp_path):
    settings = composed("callbacks=[default,early_stopping]", "fold=none")
    with pytest.raises(UsageError, match=r"early_stopping needs validation cases, fold=none has"):
        build_training(settings, tmp_path)
    assert build_training(composed("fold=none"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [("on_validation_start", 2), ("on_before_optimizer_step", 8)])
def test_patience_survives_a_kill(composed, tmp_path, monkeypatch, moment):
    monkeypatch.setattr(LastCheckpoint, "on_exception", lambda *_: None)
    settings = composed(*STOPPING, "callbacks.early_stopping.patience=3", "save_every_seconds=0")
    whole, done = train(settings, tmp_path / "whole")
    assert done
    assert whole.trainer.global_step == 12  # 4 epochs of 3 steps: one that is best, 3 that are not
    _, done = train(settings, tmp_path / "killed", At(*moment, crash))
    assert not done
    run, done = train(settings, tmp_path / "killed")
    assert done
    assert run.trainer.global_step == 12
    states = [
        load_checkpoint(tmp_path / n / "checkpoints" / "last.ckpt") for n in ("whole", "killed")
    ]
    key = "EarlyStopping[val/dice]"
    assert states[0]["callbacks"][key] == states[1]["callbacks"][key]
    run = build_training(settings, tmp_path / "killed")
    assert resolve_start(run).is_finished
    more = build_training(
        composed(*STOPPING, "callbacks.early_stopping.patience=5"), tmp_path / "killed"
    )
    assert not resolve_start(more).is_finished


MY_CALLBACK = """
from lightning.pytorch.callbacks import Callback

class CountBatches(Callback):
    def __init__(self, class_names, path):
        self.count, self.path, self.names = 0, path, class_names

    def on_train_batch_end(self, *_):
        self.count += 1

    def on_train_end(self, *_):
        with open(self.path, "w") as file:
            print(self.count, *self.names, file=file)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
"""


def test_a_users_callback_takes_one_python_file_and_one_yaml_and_is_resumed(
    unet3d, tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_callbacks.py").write_text(MY_CALLBACK)
    option = tmp_path / "conf" / "callbacks" / "count.yaml"
    option.parent.mkdir(parents=True)
    path = tmp_path / "count.txt"
    option.write_text(f"count:\n  _target_: my_callbacks.CountBatches\n  path: {path}\n")
    words = ["callbacks=[default,count]", "allow_targets=[my_callbacks]", "resume=auto"]
    assert unet3d(*words, "trainer.max_steps=2") == 0
    assert path.read_text().startswith("2 background ball")
    assert unet3d(*words, "trainer.max_steps=5") == 0
    assert path.read_text().startswith("5 ")
    assert unet3d("callbacks=[default,count]") == 2
    assert "allow_targets=[my_package]" in capsys.readouterr().err


def test_a_callback_of_lightnings_is_added(composed, tmp_path):
    words = ["+callbacks.summary._target_=lightning.pytorch.callbacks.ModelSummary"]
    run = build_training(composed(*words), tmp_path)
    assert "ModelSummary" in [type(c).__name__ for c in run.trainer.callbacks]
