"""The application, end to end."""

import json
import math
import os
import signal

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from unet3d.cli.main import main
from unet3d.lit.callbacks.step_timing import StepSpeed
from unet3d.workflows.training.build import build_training


def events(run):
    accumulator = EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_a_run_leaves_its_folder_as_documented(unet3d, tmp_path, capsys):
    assert unet3d("trainer.max_steps=3") == 0
    run = tmp_path / "run"
    assert {p.name for p in run.iterdir()} >= {
        "checkpoints",
        "config.yaml",
        "report.json",
        "tensorboard",
    }
    report = json.loads((run / "report.json").read_text())
    assert report["finished"] is True
    assert report["parameters"] == 88_860
    assert {"val/dice", "val/dice/ball", "val/iou"} <= set(report["metrics"])
    assert {"first_step", "steady_step", "validation"} == set(report["memory"])
    assert {"median_step_seconds", "median_data_wait_share"} <= set(report["speed"])
    assert report["precision"] == {"asked": "32", "used": "32"}
    assert report["config"]["data"]["num_classes"] == 4
    assert report["device"] == "cpu"
    assert {"torch", "unet3d"} <= set(report["versions"])
    shown = capsys.readouterr().out
    assert "Dice, mean" in shown
    assert "waiting for data" in shown
    assert "peak memory of a step" in shown
    assert f"tensorboard --logdir_spec run:{run}\n" in shown


def test_tensorboard_shows_curves_pictures_config_and_hparams(unet3d, tmp_path):
    assert unet3d("trainer.max_steps=3") == 0
    log = events(tmp_path / "run")
    tags = log.Tags()
    assert {
        "train/loss",
        "train/lr",
        "val/dice",
        "val/dice/ball",
        "speed/step_seconds",
        "speed/volumes_per_second",
        "speed/data_wait_share",
        "memory/step_peak_resident_mib",
        "memory/forward_peak_resident_mib",
        "memory/validation_peak_resident_mib",
        "final/dice",
        "final/step_seconds",
        "val/hd95_mm",
    } <= set(tags["scalars"])
    assert [s.step for s in log.Scalars("memory/step_peak_resident_mib")] == [0, 1, 2]
    assert len(tags["images"]) == 1  # one case validates
    assert "config/text_summary" in tags["tensors"]
    hparams = [t for t in log.summary_metadata if t.startswith("_hparams_")]
    assert hparams


def test_a_run_that_ends_within_an_epoch_validates_what_it_reached(composed, tmp_path):
    run = build_training(
        composed("trainer.max_steps=3", "trainer.check_val_every_n_epoch=9"), tmp_path
    )
    run.trainer.fit(run.task, run.train_loader, run.val_loader)
    steps = [s.step for s in events(tmp_path).Scalars("val/dice")]
    assert steps == [2]


def test_a_run_that_ends_by_time_validates_what_it_reached(composed, tmp_path):
    limits = ["trainer.max_steps=null", "trainer.max_time=00:00:00:01"]
    run = build_training(composed(*limits, "trainer.check_val_every_n_epoch=999"), tmp_path)
    run.trainer.fit(run.task, run.train_loader, run.val_loader)
    steps = [s.step for s in events(tmp_path).Scalars("val/dice")]
    assert steps == [run.trainer.global_step - 1]


def test_fold_none_trains_on_every_case_without_validation(unet3d, tmp_path):
    assert unet3d("fold=none") == 0
    assert [p.name for p in (tmp_path / "run").rglob("*.ckpt")] == ["last.ckpt"]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert not [name for name in report["metrics"] if name.startswith("val/")]


def test_resume_auto_starts_anew_goes_on_and_says_when_it_is_done(unet3d, tmp_path, capsys):
    assert unet3d("resume=auto", "trainer.max_steps=2") == 0
    assert "resumes from" not in capsys.readouterr().out
    assert unet3d("resume=auto", "trainer.max_steps=4") == 0
    assert "resumes from" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "report.json").read_text())["steps"] == 4
    assert unet3d("resume=auto", "trainer.max_steps=4") == 0
    assert "this run is finished" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_with_its_exit_code_and_a_checkpoint(
    unet3d, tmp_path, monkeypatch, capsys, number
):
    original = StepSpeed.on_train_batch_end

    def interrupted(self, trainer, *rest):
        original(self, trainer, *rest)
        if trainer.global_step == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(StepSpeed, "on_train_batch_end", interrupted)
    before = signal.getsignal(number)
    assert unet3d("trainer.max_steps=9") == (130 if number == signal.SIGINT else 143)
    assert signal.getsignal(number) is before
    assert f"stopped by {number.name} after 2 steps; resume=auto hydra.run.dir=" in (
        capsys.readouterr().out
    )
    last = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 2
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["finished"] is False


def test_a_second_ctrl_c_does_not_wait_for_the_step(unet3d, tmp_path, monkeypatch):
    def impatient(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(StepSpeed, "on_train_batch_end", impatient)
    assert unet3d("trainer.max_steps=9") == 130


def test_a_signal_before_the_first_step_has_nothing_to_wait_for(unet3d, tmp_path, monkeypatch):
    from unet3d.cli import train

    def slow(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it went on")

    monkeypatch.setattr(train, "build_training", slow)
    assert unet3d() == 143


def test_a_run_stopped_in_its_evaluation_is_evaluated_when_it_goes_on(
    unet3d, tmp_path, monkeypatch, capsys
):
    from unet3d.cli import train

    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate_best_checkpoint", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        assert unet3d("evaluation.enabled=true") == 143
    assert unet3d("evaluation.enabled=true", "resume=auto") == 0
    assert "Dice, mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", ["data.num_workers=2", "data.ignore_label=9", "augmentation=none"]
)
def test_data_options_take_effect(unet3d, option):
    assert unet3d(option, "trainer.max_steps=2") == 0


def test_the_same_seed_gives_the_same_weights_with_workers_or_without(composed, tmp_path):
    weights = []
    for n, extra in enumerate(([], ["data.num_workers=2"], ["seed=1"])):
        run = build_training(
            composed("trainer.max_steps=3", "fold=none", *extra), tmp_path / str(n)
        )
        run.trainer.fit(run.task, run.train_loader)
        weights.append(torch.cat([p.detach().flatten() for p in run.task.model.parameters()]))
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


def test_pure_half_trains_fifty_steps_without_nan(composed, tmp_path):
    run = build_training(
        composed("precision=bf16-true", "model.norm=batch", "trainer.max_steps=50", "fold=none"),
        tmp_path,
    )
    run.trainer.fit(run.task, run.train_loader)
    model = run.task.model
    assert model.encoder[0].convs[0].conv.weight.dtype == torch.bfloat16
    assert model.encoder[0].convs[0].norm.running_mean.dtype == torch.float32
    assert all(p.isfinite().all() for p in model.parameters())
    losses = [s.value for s in events(tmp_path).Scalars("train/loss")]
    assert len(losses) == 50
    assert math.isfinite(sum(losses))
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.gpu
def test_pure_fp16_trains_fifty_steps_without_nan(composed, tmp_path):
    run = build_training(
        composed(
            "trainer.accelerator=gpu", "precision=16-true", "trainer.max_steps=50", "fold=none"
        ),
        tmp_path,
    )
    run.trainer.fit(run.task, run.train_loader)
    assert all(p.isfinite().all() for p in run.task.model.parameters())


def test_the_default_job_learns_every_class(tmp_path, monkeypatch):
    """The job of `make train`, shorter, at a seed that left one class out before heads had a prior.

    Dice starts below 0.5 and ends above 0.8.
    """
    monkeypatch.chdir(tmp_path)
    words = ["seed=1", "trainer.max_epochs=9", "trainer.enable_progress_bar=false"]
    assert main(["train", *words, "hydra.run.dir=run", "trainer.accelerator=cpu"]) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert all("still rising" in warning for warning in report["warnings"])  # it is cut short
    for name in ("ball", "tube", "box"):
        assert report["metrics"][f"val/dice/{name}"] > 0.6
    dice = [s.value for s in events(tmp_path / "run").Scalars("val/dice")]
    assert dice[0] < 0.5
    assert dice[-1] > 0.8
    assert (tmp_path / "data" / "synthetic").is_dir()
