"""The application, end to end."""

import json
import math
import os
import signal

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from unet3d.checkpoint_file import load_checkpoint, save_checkpoint
from unet3d.cli.main import main
from unet3d.commands.train import build_training
from unet3d.training import limits as stopping
from unet3d.training.callbacks.step_timing import StepTimer

pytestmark = pytest.mark.slow


def read_events(run):
    accumulator = EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    return accumulator


def read_report(run):
    return json.loads((run / "report.json").read_text())


def fit(run):
    run.trainer.fit(run.module, run.data)


def test_a_run_writes_report_config_checkpoints_and_curves(unet3d, tmp_path, capsys):
    assert unet3d("trainer.max_steps=3") == 0
    run = tmp_path / "run"
    assert {"checkpoints", "config.yaml", "report.json", "tensorboard"} <= {
        path.name for path in run.iterdir()
    }
    report = read_report(run)
    assert report["finished"] is True
    assert report["parameters"] == 88_860
    assert {"val/dice", "val/dice/ball", "val/iou"} <= set(report["metrics"])
    assert {"first_step", "steady_step", "validation"} == set(report["memory"])
    assert {"median_step_seconds", "median_data_wait_fraction"} <= set(report["speed"])
    assert report["precision"] == {"requested": "32", "used": "32"}
    assert report["config"]["data"]["num_classes"] == 4
    assert report["device"] == "cpu"
    assert {"torch", "unet3d"} <= set(report["versions"])
    table = capsys.readouterr().out
    assert "Dice, mean" in table
    assert "waiting for data" in table
    assert "peak memory of a step" in table
    assert f"tensorboard --logdir {run.parent}\n" in table
    log = read_events(run)
    tags = log.Tags()
    assert {
        "train/loss",
        "train/lr",
        "val/dice",
        "val/dice/ball",
        "speed/step_seconds",
        "speed/volumes_per_second",
        "speed/data_wait_fraction",
        "memory/step_peak_resident_mib",
        "memory/forward_peak_resident_mib",
        "memory/validation_peak_resident_mib",
        "final/dice",
        "final/step_seconds",
        "val/hd95_mm",
    } <= set(tags["scalars"])
    assert [s.step for s in log.Scalars("memory/step_peak_resident_mib")] == [0, 1, 2]
    assert len(tags["images"]) == 1  # there is one validation case
    assert "config/text_summary" in tags["tensors"]
    assert [tag for tag in log.summary_metadata if tag.startswith("_hparams_")]


@pytest.mark.parametrize(
    "limit", ["trainer.max_steps=3", "trainer.max_steps=null trainer.max_time=00:00:00:01"]
)
def test_a_run_that_ends_within_an_epoch_validates_its_last_step(
    composed, tmp_path, limit, monkeypatch
):
    monkeypatch.setattr(stopping, "MIN_STEPS", 1)  # however busy the machine is
    overrides = [*limit.split(), "trainer.check_val_every_n_epoch=999"]
    run = build_training(composed(*overrides), tmp_path)
    fit(run)
    steps = [s.step for s in read_events(tmp_path).Scalars("val/dice")]
    assert steps == [run.trainer.global_step - 1]


def test_fold_none_trains_on_every_case_without_validation(unet3d, tmp_path):
    assert unet3d("fold=none") == 0
    assert [p.name for p in (tmp_path / "run").rglob("*.ckpt")] == ["last.ckpt"]
    metrics = read_report(tmp_path / "run")["metrics"]
    assert not [name for name in metrics if name.startswith("val/")]


def test_resume_auto_starts_continues_and_recognizes_a_finished_run(unet3d, tmp_path, capsys):
    assert unet3d("resume=auto", "trainer.max_steps=2") == 0
    assert "last.ckpt" not in capsys.readouterr().out
    assert unet3d("resume=auto", "trainer.max_steps=4") == 0
    assert "last.ckpt" in capsys.readouterr().out
    assert read_report(tmp_path / "run")["steps"] == 4
    assert unet3d("resume=auto", "trainer.max_steps=4") == 0
    assert "this run is already finished" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["last", "best", "hpc"])
def test_a_file_named_like_a_keyword_of_lightning_is_resumed(unet3d, tmp_path, name):
    assert unet3d("trainer.max_steps=1", "fold=none") == 0
    content = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt", mmap=False)
    content["state_dict"]["model.heads.0.bias"].fill_(50)
    save_checkpoint(content, tmp_path / name)
    other = f"hydra.run.dir={tmp_path / 'other'}"
    assert unet3d("trainer.max_steps=2", "fold=none", f"resume={name}", other) == 0
    resumed = load_checkpoint(tmp_path / "other" / "checkpoints" / "last.ckpt")
    assert resumed["state_dict"]["model.heads.0.bias"].min() > 45


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_run_with_its_exit_code_and_a_checkpoint(
    unet3d, tmp_path, monkeypatch, capsys, number
):
    original = StepTimer.on_train_batch_end

    def send_signal_after_two_steps(self, trainer, *rest):
        original(self, trainer, *rest)
        if trainer.global_step == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(StepTimer, "on_train_batch_end", send_signal_after_two_steps)
    before = signal.getsignal(number)
    assert unet3d("trainer.max_steps=9") == (130 if number == signal.SIGINT else 143)
    assert signal.getsignal(number) is before
    message = f"interrupted by {number.name} after 2 steps; resume with resume=auto hydra.run.dir="
    assert message in capsys.readouterr().out
    last = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 2
    assert read_report(tmp_path / "run")["finished"] is False


def test_a_second_ctrl_c_does_not_wait_for_the_step(unet3d, monkeypatch):
    def press_ctrl_c_twice(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the step went on")

    monkeypatch.setattr(StepTimer, "on_train_batch_end", press_ctrl_c_twice)
    assert unet3d("trainer.max_steps=9") == 130


def test_a_signal_before_the_first_step_ends_a_run_at_once(unet3d, monkeypatch):
    from unet3d.commands import train as fit

    def send_signal(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the run went on")

    monkeypatch.setattr(fit, "build_training", send_signal)
    assert unet3d() == 143


def test_a_run_interrupted_in_its_evaluation_is_evaluated_when_resumed(unet3d, monkeypatch, capsys):
    from unet3d.commands import train as fit

    def send_signal(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(fit, "evaluate_best_checkpoint", send_signal)
        assert unet3d("evaluation.enabled=true") == 143
    assert unet3d("evaluation.enabled=true", "resume=auto") == 0
    assert "Dice, mean" in capsys.readouterr().out


def test_a_run_killed_after_its_last_step_is_evaluated_when_resumed(unet3d, tmp_path, capsys):
    assert unet3d("trainer.max_steps=2") == 0
    (tmp_path / "run" / "report.json").unlink()
    assert unet3d("trainer.max_steps=2", "evaluation.enabled=true", "resume=auto") == 0
    assert "Dice, mean" in capsys.readouterr().out
    report = read_report(tmp_path / "run")
    assert (report["finished"], report["steps"]) == (True, 2)
    assert report["evaluation"]["best_of"] == 1
    assert (tmp_path / "run" / "report.html").exists()


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


@pytest.mark.parametrize("override", ["data.num_workers=2", "data.ignore_label=9"])
def test_a_run_trains_with_workers_or_an_ignored_label(composed, tmp_path, override):
    run = build_training(composed(override, "trainer.max_steps=2"), tmp_path)
    fit(run)
    assert run.trainer.global_step == 2


def test_the_same_seed_gives_the_same_weights_with_workers_or_without(composed, tmp_path):
    def train(folder, *overrides):
        settings = composed("trainer.max_steps=3", "fold=none", *overrides)
        run = build_training(settings, tmp_path / folder)
        fit(run)
        return torch.cat([p.detach().flatten() for p in run.module.model.parameters()])

    weights = train("without")
    assert train("with", "data.num_workers=2").equal(weights)
    assert not train("other", "seed=1").equal(weights)


def test_pure_half_precision_trains_fifty_steps_without_nan(composed, tmp_path):
    overrides = ["precision=bf16-true", "model.norm=batch", "trainer.max_steps=50", "fold=none"]
    run = build_training(composed(*overrides), tmp_path)
    fit(run)
    model = run.module.model
    assert model.encoder[0].convs[0].conv.weight.dtype == torch.bfloat16
    assert model.encoder[0].convs[0].norm.running_mean.dtype == torch.float32
    assert all(p.isfinite().all() for p in model.parameters())
    losses = [s.value for s in read_events(tmp_path).Scalars("train/loss")]
    assert len(losses) == 50
    assert math.isfinite(sum(losses))
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.gpu
def test_pure_fp16_trains_fifty_steps_without_nan(composed, tmp_path):
    overrides = ["trainer.accelerator=gpu", "precision=16-true", "trainer.max_steps=50"]
    run = build_training(composed(*overrides, "fold=none"), tmp_path)
    fit(run)
    assert all(p.isfinite().all() for p in run.module.model.parameters())


def test_the_default_run_learns_every_class(tmp_path, monkeypatch):
    """`make train`, but shorter, at a seed that missed a class before heads had a prior bias.

    Dice starts below 0.5 and ends above 0.8.
    """
    monkeypatch.chdir(tmp_path)
    overrides = ["seed=1", "trainer.max_epochs=12", "trainer.enable_progress_bar=false"]
    assert main(["train", *overrides, "hydra.run.dir=run", "trainer.accelerator=cpu"]) == 0
    report = read_report(tmp_path / "run")
    assert all("still rising" in warning for warning in report["warnings"])  # it is cut short
    for name in ("ball", "tube", "box"):
        assert report["metrics"][f"val/dice/{name}"] > 0.6
    dice = [s.value for s in read_events(tmp_path / "run").Scalars("val/dice")]
    assert dice[0] < 0.5
    assert dice[-1] > 0.8
    assert (tmp_path / "data" / "synthetic").is_dir()


def test_a_run_that_goes_on_in_a_new_folder_keeps_the_best_checkpoint(unet3d, tmp_path, capsys):
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
    (old / "best.ckpt").unlink()
    capsys.readouterr()
    assert unet3d(*words, "trainer.max_steps=6", f"resume={tmp_path / 'run'}", f"{new}2") == 0
    assert "has no best.ckpt of these 4 steps" in capsys.readouterr().out
