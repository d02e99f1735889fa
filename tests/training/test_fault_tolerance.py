"""Training on a real file system that is full; skipped where none can be mounted."""

import csv
import json
import subprocess

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from unet3d.training import checkpoints
from unet3d.training.checkpoints import AtomicCheckpointIO, LastCheckpoint
from unet3d.training.loggers import ResumableCSVLogger, ResumableTensorBoardLogger, close_logger
from unet3d.training.module import SegmentationModule


@pytest.fixture
def tiny(tmp_path):
    """Mount a file system of 6 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True)
    except OSError:
        pytest.skip("needs the mount command")
    if done.returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    """Fill the file system."""
    with (folder / "filler").open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def read_steps(folder, name):
    """Return the steps of a curve in TensorBoard's only file."""
    (path,) = folder.glob("events*")
    return [
        event.step
        for event in EventFileLoader(str(path)).Load()
        if any(value.tag == name for value in event.summary.value)
    ]


@pytest.fixture
def filled_at_step(monkeypatch):
    """Fill a file system from one step on, and free it at another."""

    def at(folder, full, free=99):
        original = SegmentationModule.training_step
        save = checkpoints.save_checkpoint

        def training_step(self, batch, batch_idx):
            if self.global_step == free:
                (folder / "filler").unlink()
            return original(self, batch, batch_idx)

        def save_when_full(content, path):
            if full <= content["global_step"] < free:
                fill(folder)
            save(content, path)

        monkeypatch.setattr(SegmentationModule, "training_step", training_step)
        monkeypatch.setattr(checkpoints, "save_checkpoint", save_when_full)

    return at


@pytest.fixture
def saved_every_step(monkeypatch):
    original = LastCheckpoint.__init__
    monkeypatch.setattr(
        LastCheckpoint,
        "__init__",
        lambda self, folder, **_: original(self, folder, every_seconds=0),
    )


def test_a_run_continues_on_a_full_disk_and_reports_at_its_end_what_is_missing(
    unet3d, tiny, capsys, filled_at_step, saved_every_step
):
    filled_at_step(tiny, full=5)
    assert unet3d("trainer.max_steps=9", f"hydra.run.dir={tiny / 'run'}") == 4
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert [line for line in lines if "Traceback" in line] == []
    assert sum("some metrics were not logged; training continues" in line for line in lines) == 1
    kept = "keeping the previous checkpoint; training continues"
    warnings = [line for line in lines if kept in line]
    assert 1 <= len(warnings) == len(set(warnings)) <= 3
    assert all(line.endswith("or choose another folder") for line in warnings)
    last = tiny / "run" / "checkpoints" / "last.ckpt"
    assert f"{last}: No space left on device; keeping the previous checkpoint" in lines[-1]
    assert f"{tiny / 'run' / 'report.json'}: No space left on device" in lines[-1]
    assert torch.load(last, weights_only=True)["global_step"] == 4
    names = {"last.ckpt", "previous.ckpt", "best.ckpt"}
    assert {p.name for p in last.parent.iterdir()} == names
    assert "step time" in captured.out  # the table


def test_a_run_whose_disk_has_space_again_succeeds(
    unet3d, tiny, capsys, filled_at_step, saved_every_step
):
    filled_at_step(tiny, full=4, free=7)
    assert unet3d("trainer.max_steps=9", f"hydra.run.dir={tiny / 'run'}", "fold=none") == 0
    assert "training continues" in capsys.readouterr().err
    last = torch.load(tiny / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 9
    assert json.loads((tiny / "run" / "report.json").read_text())["finished"] is True
    steps = read_steps(tiny / "run" / "tensorboard", "train/loss")
    assert {0, 1, 2, 8} <= set(steps) < set(range(9))


def test_an_event_file_holds_complete_records_only(tiny, capsys):
    logger = ResumableTensorBoardLogger(tiny, name="", version="")
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    fill(tiny)
    for step in range(1, 200):
        logger.log_metrics({"loss": 1.0}, step)
    logger.save()
    (tiny / "filler").unlink()
    logger.log_metrics({"loss": 1.0}, 200)
    close_logger(logger, finished=True)
    steps = read_steps(tiny, "loss")
    assert (steps[0], steps[-1]) == (0, 200)
    assert len(steps) < 201
    assert capsys.readouterr().err.count("No space left on device") == 1


@pytest.mark.parametrize("full", [0, 1])
def test_a_table_goes_on_when_the_disk_has_space_again(tiny, capsys, full):
    logger = ResumableCSVLogger(tiny, "")
    for step in range(2000):
        if step == full:
            fill(tiny)
        if step == 1998:
            (tiny / "filler").unlink()
        logger.log_metrics({"loss": 0.5}, step)
        if step == 1999:
            logger.log_metrics({"dice": 0.5}, step)
        logger.save()
    with (tiny / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "loss", "dice"]
    steps = [int(row["step"]) for row in rows]
    assert steps[-2:] == [1998, 1999]
    assert len(steps) < 2000
    assert capsys.readouterr().err.count("some metrics were not logged; training continues") == 1


def test_a_checkpoint_that_does_not_fit_keeps_the_previous_one(tiny, capsys):
    checkpoint_io, path = AtomicCheckpointIO(), tiny / "last.ckpt"
    checkpoint_io.save_checkpoint({"a": 1}, path)
    for _ in range(2):
        checkpoint_io.save_checkpoint({"a": torch.zeros(2**21)}, path)
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert list(checkpoint_io.failed_saves) == ["last.ckpt"]
    assert torch.load(path, weights_only=True) == {"a": 1}
    checkpoint_io.save_checkpoint({"a": 2}, path)
    assert checkpoint_io.failed_saves == {}
    assert {file.name for file in tiny.iterdir()} == {"last.ckpt", "previous.ckpt"}


def test_other_errors_while_saving_are_raised(tmp_path):
    with pytest.raises((AttributeError, TypeError)):
        AtomicCheckpointIO().save_checkpoint({"a": lambda: None}, tmp_path / "last.ckpt")
