"""How the processes of one run end together."""

import subprocess
import time

import pytest

from unet3d.cli.launch import wait_for_ranks
from unet3d.errors import Interrupted, RunError


def ranks(*scripts):
    return [subprocess.Popen(["sh", "-c", script]) for script in scripts]


def test_a_signal_before_a_rank_listens_stops_the_run_and_the_others_at_once():
    begun = time.monotonic()
    processes = ranks("kill -TERM $$", "sleep 30")
    with pytest.raises(Interrupted) as stopped:
        wait_for_ranks(processes, [])
    assert stopped.value.exit_code == 143
    assert time.monotonic() - begun < 5
    assert all(process.poll() is not None for process in processes)


@pytest.mark.parametrize("other", ["exit 0", "sleep 0.3; exit 4"])
def test_a_rank_that_was_asked_to_leave_stops_the_run_whatever_becomes_of_the_others(other):
    with pytest.raises(Interrupted) as stopped:
        wait_for_ranks(ranks("exit 143", other), [])
    assert stopped.value.exit_code == 143


def test_a_rank_that_was_paused_is_not_waited_for_once_another_has_failed():
    begun = time.monotonic()
    processes = ranks("sleep 0.5; exit 4", "kill -STOP $$")
    with pytest.raises(RunError, match="rank 0 ended with exit code 4"):
        wait_for_ranks(processes, [])
    assert time.monotonic() - begun < 5
    assert processes[1].poll() == -9


def test_a_rank_that_fails_is_named_though_others_were_asked_to_leave():
    with pytest.raises(RunError, match="rank 1 ended with exit code 4"):
        wait_for_ranks(ranks("sleep 0.5; exit 143", "exit 4"), [])
