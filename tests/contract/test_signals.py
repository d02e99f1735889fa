"""Signals end a run with one checkpoint and their exit code; a folder belongs to one run."""

import time

import pytest

from tests.contract.helpers.runs import add_faults, read_report, read_step, send_signals


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGUSR1", 143), ("SIGINT", 130)])
def test_a_signal_ends_a_run_with_a_checkpoint_and_its_exit_code(train, tmp_path, name, code):
    ended = train("trainer.max_steps=9", *send_signals(tmp_path, ("train_batch_start", 1, name)))
    assert ended.code == code
    assert f"interrupted by {name}" in ended.out
    assert "resume=auto" in ended.out
    assert read_step(tmp_path / "run" / "checkpoints" / "last.ckpt") == 2
    assert read_report(tmp_path / "run")["finished"] is False


def test_a_second_ctrl_c_does_not_wait_for_the_step(train, tmp_path):
    assert train("trainer.max_steps=9", *add_faults(tmp_path, "PressTwice")).code == 130


def test_a_second_run_in_a_folder_is_refused(start, train, small, tmp_path):
    running = tmp_path / "running"
    hang = add_faults(tmp_path, "Hang", Hang={"file": str(running)})
    first = start("train", *small, "hydra.run.dir=run", *hang)
    while not running.exists():
        assert first.poll() is None
        time.sleep(0.05)
    second = train("resume=auto")
    assert second.code == 2
    assert len(second.err.splitlines()) == 1
    assert "in use" in second.err
