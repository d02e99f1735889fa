"""NaN, divergence, full disks, dead workers: a run goes on, or one line says what happened."""

import re
import resource

import pytest
import yaml
from torch.utils.data._utils import signal_handling

from tests.contract.helpers.runs import (
    FAULTS,
    add_faults,
    read_curve,
    read_report,
    read_step,
    read_weights,
)

LONG = ["trainer.max_steps=5", "fold=none"]


def test_a_nan_in_an_image_ends_the_run_with_step_case_and_cause(train, tmp_path):
    ended = train(*LONG, *add_faults(tmp_path, "SpoilImages", SpoilImages={"step": 2}))
    assert ended.code == 4
    assert len(ended.err.splitlines()) == 1
    assert re.search(r"nan at step 2.* case_00\d.* image .*max_skipped_steps", ended.err)
    report = read_report(tmp_path / "run")
    assert report["finished"] is False
    assert report["error"] in ended.err


def test_a_nan_is_not_in_the_checkpoint_of_the_run_that_it_ended(train, tmp_path):
    faults = add_faults(tmp_path, "SpoilImages", SpoilImages={"step": 2})
    train(*LONG, "model.norm=batch", *faults)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert read_step(last) == 2
    assert all(tensor.isfinite().all() for tensor in read_weights(last).values())


def test_a_nan_of_a_layer_is_reported_with_the_layer(train, tmp_path):
    name = "encoder.1.convs.0.conv"
    settings = {"name": f"model.{name}.weight"}
    ended = train(*LONG, *add_faults(tmp_path, "SpoilWeight", SpoilWeight=settings))
    assert ended.code == 4
    assert name in ended.err


@pytest.mark.parametrize(("tolerated", "code"), [(0, 4), (1, 0)])
def test_max_skipped_steps_tolerates_a_loss_that_is_not_finite(train, tmp_path, tolerated, code):
    faults = add_faults(tmp_path, "SpoilLoss", SpoilLoss={"step": 2})
    loss = tmp_path / "conf" / "loss" / "spoiled.yaml"
    loss.parent.mkdir()
    loss.write_text(yaml.safe_dump({"_target_": f"{FAULTS}.Loss"}))
    options = [*LONG, "logger=csv", "loss=spoiled", f"max_skipped_steps={tolerated}"]
    assert train(*options, *faults).code == code
    assert read_report(tmp_path / "run")["skipped_steps"] == 1
    if tolerated:
        assert read_curve(tmp_path / "run", "train/skipped_steps") == [(2, "1.0")]
        weights = read_weights(tmp_path / "run" / "checkpoints" / "last.ckpt")
        assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_training_that_diverged_ends_with_4_and_names_the_learning_rate(train, tmp_path):
    ended = train(
        *("optimizer.lr=1e10", "trainer.max_steps=12", "max_skipped_steps=100", "logger=none"),
        *("validation.hd95=false", "evaluation.enabled=true"),
    )
    assert ended.code == 4
    assert "diverged" in ended.err
    assert "lower optimizer.lr" in ended.err
    assert "evaluation" not in read_report(tmp_path / "run")


@pytest.fixture
def disk():
    """Give the disk back to the test process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("disk")
def test_a_full_disk_does_not_end_a_run_which_then_names_what_is_missing(train, tmp_path):
    faults = add_faults(tmp_path, "FillDisk", FillDisk={"first": 2, "free": 99})
    ended = train(*LONG, "save_every_seconds=0", *faults)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert ended.code == 4
    assert "training continues" in ended.err
    assert str(last) in ended.err.splitlines()[-1]
    assert 0 < read_step(last) <= 2
    assert read_report(tmp_path / "run")["steps"] == 5


@pytest.mark.usefixtures("disk")
def test_a_run_whose_disk_has_space_again_succeeds(train, tmp_path):
    faults = add_faults(tmp_path, "FillDisk", FillDisk={"first": 1, "free": 3})
    ended = train(*LONG, "save_every_seconds=0", *faults)
    assert ended.code == 0
    assert "training continues" in ended.err
    assert read_step(tmp_path / "run" / "checkpoints" / "last.ckpt") == 5


# If the signal arrives while an object is finalized, Python drops torch's error, which comes again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dead_data_worker_is_reported_with_a_case_and_advice(train, tmp_path, monkeypatch):
    # torch notices dead workers by a handler, which Lightning removes when another test ends
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    many = ["trainer.max_steps=50", "data.patches_per_case=40", "data.num_workers=1"]
    ended = train(*many, *add_faults(tmp_path, "KillWorkers"))
    assert ended.code == 4
    assert len(ended.err.splitlines()) == 1
    assert re.search(r"data worker.*case_00\d.*data\.num_workers", ended.err)
