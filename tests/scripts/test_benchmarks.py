"""Benchmarks: examples in docstrings, summaries of results, and two in their shortest form."""

import doctest
import json
import subprocess
import sys
from importlib import import_module

import pytest

from scripts.bench.quality import summarize
from scripts.bench.results import ROOT
from scripts.bench.start import COMMANDS, time_process
from scripts.docs import tables

PATHS = [p for p in sorted((ROOT / "scripts").rglob("*.py")) if ">>> " in p.read_text()]
QUALITY = ("quality", "screen-quality", "hippocampus", "recipes")
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PATHS]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_scripts_are_true(name):
    results = doctest.testmod(import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("name", [f"cpu-{name}" for name in QUALITY])
def test_summaries_of_dice_follow_from_the_recorded_runs(name):
    for variants in tables.read_result(name).values():
        for entry in variants.values():
            summary = summarize(entry["rows"])
            assert summary.keys() == entry["summary"].keys()
            assert summary["dice"] == pytest.approx(entry["summary"]["dice"])


@pytest.mark.long
def test_a_run_is_timed_up_to_its_first_step(tmp_path):
    seconds, phases = time_process(COMMANDS["unet3d train, to its first step"], tmp_path)
    assert {"imports", "first validation volume", "first step"} <= phases.keys()
    assert 0 < sum(phases.values()) <= seconds


@pytest.mark.long
def test_steps_are_timed_in_turns(tmp_path):
    words = ("--cases", "patches of 16", "--processes", "2", "--output", tmp_path / "result.json")
    command = [sys.executable, "-m", "scripts.bench.step_times", *words]
    subprocess.run(command, cwd=ROOT, check=True)
    result = json.loads((tmp_path / "result.json").read_text())
    rows = result["times, 32"]["cases"]["patches of 16"]["rows"]
    assert set(rows) == {"plain modules", "fused", "lean"}
    assert rows["plain modules"]["time_ratio"] == 1
    assert all(row["median_seconds"] > 0 for row in rows.values())
