"""Times of steps: over processes, and of the host."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import step_times

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_a_ratio_is_the_median_over_processes_of_medians_over_rounds():
    case = step_times.CASES["patches of 16"]
    runs = [
        {"plain modules": [1.0, 2.0, 1.0], "fused": [0.5, 1.0, 9.0], "lean": [1.0, 2.0, 1.0]},
        {"plain modules": [1.0, 1.0, 1.0], "fused": [0.6, 0.6, 0.6], "lean": [1.0, 1.0, 1.0]},
        {"plain modules": [1.0, 1.0, 1.0], "fused": [0.9, 0.9, 0.9], "lean": [1.0, 1.0, 1.0]},
    ]
    result = step_times.summarize(case, runs)
    fused = result["rows"]["fused"]
    assert (fused["time_ratio"], fused["time_ratio_range"]) == (0.6, [0.5, 0.9])
    assert (result["processes"], result["rounds"]) == (3, 3)


def test_networks_are_timed_in_processes_of_their_own(tmp_path):
    words = ["--cases", "patches of 16", "--processes", "2", "--rounds", "1"]
    run("scripts.bench.step_times", *words, "--output", str(tmp_path))
    content = json.loads((tmp_path / "cpu-step.json").read_text("utf-8"))
    rows = content["times, 32"]["cases"]["patches of 16"]["rows"]
    assert set(rows) == {"plain modules", "fused", "lean"}
    assert all(row["median_seconds"] > 0 for row in rows.values())


def test_the_host_launches_as_many_kernels_as_a_step_of_full_size(tmp_path):
    run("scripts.bench.host_time", "--rounds", "1", "--output", str(tmp_path))
    rows = json.loads((tmp_path / "cpu-step.json").read_text("utf-8"))["host"]
    assert rows["fused, 64 MiB"]["triton_launches"] == pytest.approx(295, rel=0.05)
    assert rows["fused, 16 MiB"]["host_ms"] > rows["fused, 256 MiB"]["host_ms"] > 0


def run(module: str, *words: str) -> None:
    command = [sys.executable, "-m", module, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
