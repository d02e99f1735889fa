"""Benchmarks in their shortest form: times of a step and of the start, and stopped runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    """Run a script; return what it writes."""

    def run(module, *words):
        path = tmp_path / "result.json"
        command = [sys.executable, "-m", module, *words, "--output", path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(path.read_text())

    return run


def test_a_run_is_timed_up_to_its_first_step(run):
    result = run("scripts.bench.start", "--runs", "1")
    train = result["commands"]["unet3d train, to its first step"]
    phases = train["median_seconds_by_phase"]
    assert list(phases) == [
        "python",
        "imports",
        "build, with the memory estimate",
        "first validation volume",
        "first step",
    ]
    assert 0 < sum(phases.values()) <= train["median_seconds"] + 0.01


def test_steps_are_timed_in_turns(run):
    words = ("--cases", "patches of 16", "--processes", "2")
    rows = run("scripts.bench.step_times", *words)["times, 32"]["cases"]["patches of 16"]["rows"]
    assert set(rows) == {"plain modules", "fused", "lean"}
    assert rows["plain modules"]["time_ratio"] == 1
    assert all(row["median_seconds"] > 0 for row in rows.values())


def test_runs_that_are_killed_and_stopped_end_like_uninterrupted_ones(run):
    rows = run("scripts.chaos", "--stops", "2", "--steps", "60")["rows"]
    assert [row["ranks"] for row in rows] == [1, 2]
    assert all(row["identical"] for row in rows)
