"""Benchmarks in their shortest form: times of a step and of the start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.start import COMMANDS, time_process

pytestmark = pytest.mark.long

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


def test_a_run_is_timed_up_to_its_first_step(tmp_path):
    timing = time_process(COMMANDS["unet3d train, to its first step"], tmp_path)
    assert list(timing.phases) == [
        "python",
        "imports",
        "build, with the memory estimate",
        "first validation volume",
        "first step",
    ]
    assert 0 < sum(timing.phases.values()) <= timing.wall


def test_steps_are_timed_in_turns(run):
    words = ("--cases", "patches of 16", "--processes", "2")
    rows = run("scripts.bench.step_times", *words)["times, 32"]["cases"]["patches of 16"]["rows"]
    assert set(rows) == {"plain modules", "fused", "lean"}
    assert rows["plain modules"]["time_ratio"] == 1
    assert all(row["median_seconds"] > 0 for row in rows.values())
