"""Loggers: what files and services have of a run, also of one that was killed and resumed."""

import csv
import re
import resource
import time
from contextlib import contextmanager

import pytest
from lightning.pytorch.callbacks import Callback
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from tests.helpers.training import fit
from unet3d.commands.train import build_training
from unet3d.training.callbacks.checkpoints import LastCheckpoint
from unet3d.training.loggers import (
    FINAL_METRICS,
    ResumableCSVLogger,
    ResumableTensorBoardLogger,
    close_logger,
)
from unet3d.training.start import prepare_start


def read_csv(folder):
    with (folder / "csv" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


MISSING = "some metrics were not logged; training continues"


@contextmanager
def full_disk(size):
    """Let no file grow beyond a size; writing more is an OSError, after what still fits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_event_file_holds_complete_records_only(tmp_path, capsys):
    logger = ResumableTensorBoardLogger(tmp_path, name="", version="")
    with full_disk(600):
        for step in range(50):
            logger.log_metrics({"loss": 1.0}, step)
        logger.save()
    logger.log_metrics({"loss": 1.0}, 50)
    close_logger(logger, finished=True)
    (path,) = tmp_path.iterdir()
    steps = [event.step for event in EventFileLoader(str(path)).Load() if event.summary.value]
    assert steps == [*range(len(steps) - 1), 50]
    assert 2 < len(steps) < 50
    assert capsys.readouterr().err.count(MISSING) == 1


def test_a_table_goes_on_when_the_disk_has_space_again(tmp_path, capsys):
    logger = ResumableCSVLogger(tmp_path)
    with full_disk(100):
        for step in range(50):
            logger.log_metrics({"loss": 0.5}, step)
            logger.save()
    logger.log_metrics({"loss": 0.5, "dice": 0.5}, 50)
    logger.save()
    rows = read_csv(tmp_path)
    assert [row["step"] for row in rows] == [*map(str, range(51))]
    assert rows[-1] == {"step": "50", "loss": "0.5", "dice": "0.5"}
    assert capsys.readouterr().err.count(MISSING) == 1


@pytest.mark.slow
def test_several_loggers_get_what_each_can_show(composed, tmp_path):
    words = ["+logger.plain._target_=lightning.pytorch.loggers.CSVLogger"]
    words += ["logger=[tensorboard,csv]", "+logger.plain.name=plain", "trainer.max_steps=2"]
    run = build_training(composed(*words, "pool=median", "memory.estimate=true"), tmp_path)
    fit(run)
    run.callbacks.dashboard.finish({"dice": 0.5}, 2, finished=True)
    assert read_csv(tmp_path)[-1]["final/dice"] == "0.5"
    [other] = (tmp_path / "plain").glob("*/metrics.csv")
    assert "final/dice" in other.read_text()
    assert "memory/validation_peak" in other.read_text()
    [picture, *_] = (tmp_path / "csv" / "images" / "cases").glob("*/1.png")
    with Image.open(picture) as image:
        assert image.mode == "RGB"
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [point.step for point in events.Scalars("final/dice")] == [2]
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    assert {"memory/timeline", "memory/layers"} < {*events.Tags()["images"]}
    session = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"median" in session
    shown = events.summary_metadata["_hparams_/experiment"].plugin_data.content
    assert all(name.encode() in shown for name in ("pool", *FINAL_METRICS))


class Crash(Callback):
    """Crash in the sixth step."""

    def on_before_optimizer_step(self, trainer, *_):
        if trainer.global_step == 5:
            raise RuntimeError("crashed")


@pytest.mark.slow
def test_services_have_one_run_without_gaps_of_one_that_was_killed_and_resumed(
    composed, tmp_path, monkeypatch
):
    """It is resumed from the checkpoint before the step in which it crashed."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import mlflow
    import wandb

    wandb.finish()  # the run of a test before, in the same process
    monkeypatch.setattr(LastCheckpoint, "on_exception", lambda *_: None)
    options = ["data.layout.num_cases=8", "data.num_workers=0", "resume=auto"]
    options += ["trainer.max_steps=7", "save_every_seconds=0", "logger=[csv,mlflow,wandb]"]
    killed = build_training(composed(*options), tmp_path)
    killed.trainer.callbacks[:0] = [Crash()]
    with pytest.raises(RuntimeError, match="crashed"):
        fit(killed)
    mlflow.flush_async_logging()
    wandb.finish(exit_code=1)
    resumed = build_training(composed(*options), tmp_path)
    fit(resumed, prepare_start(resumed).checkpoint)
    resumed.callbacks.dashboard.finish({"dice": 0.25}, 7, finished=True)

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("unet3d")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["model"] == "unet_tiny"
    rows = read_csv(tmp_path)
    for name in ("train/loss", "val/dice", "final/dice"):
        expected = {int(row["step"]): float(row[name]) for row in rows if row[name]}
        points = client.get_metric_history(run.info.run_id, name)
        assert {point.step: point.value for point in points} == pytest.approx(expected)

    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1
    deadline = time.monotonic() + 30
    while (steps := find_steps(files)) < set(range(8)) and time.monotonic() < deadline:
        time.sleep(0.3)  # W&B writes in a process of its own
    assert steps == set(range(8))
    assert b"final/dice" in files[1].read_bytes()
    assert list(tmp_path.glob("wandb/*/files/media/images/cases/*.png"))


def find_steps(files):
    """Return the steps of rows in files of W&B, whose format is protocol buffers."""
    pattern = re.compile(rb"trainer/global_step\x82\x01(.)(\d+)", re.DOTALL)
    found = [row for path in files for row in pattern.findall(path.read_bytes())]
    return {int(digits[: length[0]]) for length, digits in found}  # what follows may be a digit
