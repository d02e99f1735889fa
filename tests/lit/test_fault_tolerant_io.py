"""On a real file system that is full: where one cannot be mounted, these tests are left out."""

import json
import subprocess

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from unet3d.lit.callbacks import checkpoints
from unet3d.lit.callbacks.checkpoints import LastCheckpoint
from unet3d.lit.fault_tolerant_io import AppendOnlyEventFile, FaultTolerantCheckpointIO
from unet3d.lit.module import SegmentationModule


@pytest.fixture
def tiny(tmp_path):
    """A file system of 6 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True)
    except OSError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip("nothing may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    """Leave no byte free."""
    with (folder / "filler").open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


@pytest.fixture
def filled_at_step(monkeypatch):
    """Fills a folder from a step on, and makes room again when another one begins."""

    def at(folder, full, room=99):
        original = SegmentationModule.training_step
        write = checkpoints.write_checkpoint

        def training_step(self, batch, batch_idx):
            if self.global_step == room:
                (folder / "filler").unlink()
            return original(self, batch, batch_idx)

        def write_when_full(trainer, path):
            if full <= trainer.global_step < room:
                fill(folder)
            write(trainer, path)

        monkeypatch.setattr(SegmentationModule, "training_step", training_step)
        monkeypatch.setattr(checkpoints, "write_checkpoint", write_when_full)

    return at


@pytest.fixture
def saved_every_step(monkeypatch):
    original = LastCheckpoint.__init__
    monkeypatch.setattr(
        LastCheckpoint,
        "__init__",
        lambda self, folder, **_: original(self, folder, every_seconds=0),
    )


def test_a_run_goes_on_when_the_disk_is_full_and_says_at_its_end_what_is_missing(
    unet3d, tiny, capsys, filled_at_step, saved_every_step
):
    filled_at_step(tiny, full=5)
    assert unet3d("trainer.max_steps=9", f"hydra.run.dir={tiny / 'run'}") == 4
    said = capsys.readouterr()
    lines = said.err.strip().splitlines()
    assert [line for line in lines if "Traceback" in line] == []
    assert sum("curves have gaps, training goes on" in line for line in lines) == 1
    goes_on = [line for line in lines if line.endswith("the one before it stays, training goes on")]
    assert len(goes_on) == len(set(goes_on)) <= 2
    last = tiny / "run" / "checkpoints" / "last.ckpt"
    assert f"{last}: No space left on device; the one before it stays" in lines[-1]
    assert f"{tiny / 'run' / 'report.json'}: No space left on device" in lines[-1]
    assert torch.load(last, weights_only=True)["global_step"] == 4
    names = {"last.ckpt", "previous.ckpt", "best.ckpt"}
    assert {p.name for p in last.parent.iterdir()} == names
    assert "seconds per step" in said.out  # the table


def test_a_run_that_has_room_again_ends_well(
    unet3d, tiny, capsys, filled_at_step, saved_every_step
):
    filled_at_step(tiny, full=4, room=7)
    assert unet3d("trainer.max_steps=9", f"hydra.run.dir={tiny / 'run'}", "fold=none") == 0
    assert "training goes on" in capsys.readouterr().err
    last = torch.load(tiny / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 9
    assert json.loads((tiny / "run" / "report.json").read_text())["finished"] is True
    (path,) = (tiny / "run" / "tensorboard").glob("events*")
    steps = [
        event.step
        for event in EventFileLoader(str(path)).Load()
        if any(value.tag == "train/loss" for value in event.summary.value)
    ]
    assert {0, 1, 2, 3, 8} <= set(steps)


def test_an_event_file_takes_whole_records_or_nothing(tiny, capsys):
    events = AppendOnlyEventFile(tiny / "events")
    events.write(b"a" * 1000)
    for _ in range(3):
        events.write(b"b" * 8 * 2**20)
    events.write(b"c" * 1000)
    assert (tiny / "events").read_bytes() == b"a" * 1000 + b"c" * 1000
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_it(tiny, capsys):
    lasting, path = FaultTolerantCheckpointIO(), tiny / "last.ckpt"
    lasting.save_checkpoint({"a": 1}, path)
    for _ in range(2):
        lasting.save_checkpoint({"a": torch.zeros(2**21)}, path)
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert list(lasting.missing) == ["last.ckpt"]
    assert torch.load(path, weights_only=True) == {"a": 1}
    lasting.save_checkpoint({"a": 2}, path)
    assert lasting.missing == {}
    assert list(tiny.iterdir()) == [path]


def test_another_error_of_a_checkpoint_is_not_hidden(tmp_path):
    with pytest.raises((AttributeError, TypeError)):
        FaultTolerantCheckpointIO().save_checkpoint({"a": lambda: None}, tmp_path / "last.ckpt")
