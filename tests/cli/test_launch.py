"""`unet3d train` with several local ranks: how they end together."""

import os
import subprocess
import time

import pytest

from unet3d.cli.launch import start_ranks, wait_for_ranks
from unet3d.errors import Interrupted, RunError


def ranks(*scripts):
    return [subprocess.Popen(["sh", "-c", script]) for script in scripts]


def test_ranks_share_the_cores_where_the_system_does_not_say_which_may_be_used(
    tmp_path, monkeypatch
):
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    assert [process.wait() for process in start_ranks(["--help"], tmp_path, 2)] == [0, 0]


def test_ranks_import_nothing_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    (process,) = start_ranks(["--help"], tmp_path, 1)
    assert process.wait() == 0


def test_a_signal_before_a_rank_handles_signals_stops_all_ranks():
    begun = time.monotonic()
    processes = ranks("kill -TERM $$", "sleep 30")
    with pytest.raises(Interrupted) as stopped:
        wait_for_ranks(processes, [])
    assert stopped.value.exit_code == 143
    assert time.monotonic() - begun < 5
    assert all(process.poll() is not None for process in processes)


@pytest.mark.parametrize("other", ["exit 0", "sleep 0.3; exit 4"])
def test_an_interrupted_rank_interrupts_the_run_however_the_others_end(other):
    with pytest.raises(Interrupted) as stopped:
        wait_for_ranks(ranks("exit 143", other), [])
    assert stopped.value.exit_code == 143


def test_a_stopped_rank_is_killed_once_another_has_failed():
    begun = time.monotonic()
    processes = ranks("sleep 0.5; exit 4", "kill -STOP $$")
    with pytest.raises(RunError, match="rank 0 reported the error above"):
        wait_for_ranks(processes, [])
    assert time.monotonic() - begun < 5
    assert processes[1].poll() == -9


def test_a_rank_that_fails_is_named_even_if_others_were_interrupted():
    with pytest.raises(RunError, match="rank 1 reported the error above"):
        wait_for_ranks(ranks("sleep 0.5; exit 143", "exit 4"), [])
