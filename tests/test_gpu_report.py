"""The GPU's report as far as a CPU can show it: what is lost when, and where figures go."""

import json
import shutil
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_parts as parts  # noqa: E402
import gpu_report as report  # noqa: E402
import readme_tables as tables  # noqa: E402

WORKER = """
import json, os, sys, time
order = json.load(sys.stdin)
def tell(**what):
    with open(order["told"], "a") as file:
        file.write(json.dumps(what) + "\\n")
tell(names=["first", "dies", "spoilt", "hangs", "last"])
for name in ["first", "dies", "spoilt", "hangs", "last"]:
    if name in order["skip"]:
        continue
    tell(begun=name)
    if name == "dies":
        os.abort()
    if name == "spoilt":
        tell(name=name, error="CUDA error")
        sys.exit(75)
    if name == "hangs":
        time.sleep(60)
    tell(name=name, value={"good": True, "seconds_of": os.getpid()}, seconds=0.0)
"""


@pytest.fixture
def call(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    return report.Call(
        device="cpu",
        tiny=False,
        ends=time.time() + 60,
        scratch=tmp_path,
        data=tmp_path,
        save=lambda: None,
        worker=tmp_path / "worker.py",
    )


def part(limit):
    return parts.Part(module="", about="", limit=limit, least=0, summary=parts.good_rows)


def test_whatever_becomes_of_a_row_the_others_are_kept(call):
    found = {}
    report.run_part("part", part(3), found, call)
    assert list(found["rows"]) == ["first"]
    assert {name: why.split(":")[0] for name, why in found["failed"].items()} == {
        "dies": "exit code -6",
        "spoilt": "CUDA error",
        "hangs": "over the limit of 3 s",
    }
    assert found["state"] == "cut off"
    report.run_part("part", part(3), found, call)
    assert list(found["rows"]) == ["first", "last"]
    assert found["state"] == "failed"
    assert found["summary"] == {"good": 2, "bad": []}


def test_a_process_that_cannot_begin_says_why(call):
    call.worker.write_text("raise SystemExit('no such module')")
    found = {}
    report.run_part("part", part(3), found, call)
    assert found["state"] == "failed"
    assert "no such module" in found["failed"]["(start)"]


def test_parts_that_are_done_are_left_alone_and_those_cut_off_are_not():
    known = {"tests": {"state": "done"}, "pool": {"state": "failed"}, "forum": {"state": "cut off"}}
    assert not {"tests", "pool"} & set(report.missing(known))
    assert {"forum", "predict"} <= set(report.missing(known))


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(report, "device_name", lambda: None)
    assert report.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Two parts in their smallest form, each in a process of its own as on a GPU."""
    folder = tmp_path_factory.mktemp("rehearsed")
    assert report.main(["--rehearse", "--output", str(folder), "forum", "predict"]) == 0
    return folder


def test_a_rehearsal_measures_on_a_cpu_and_writes_nothing_into_benchmarks(rehearsed):
    content = json.loads((rehearsed / "rehearsal.json").read_text())
    assert content["device"] == "rehearsal"
    assert {part["state"] for part in content["parts"].values()} == {"done"}
    assert content["parts"]["forum"]["rows"]["small, as written"]["step_seconds"] > 0
    assert content["parts"]["predict"]["summary"]["allocated"]["median_percent"] > 0
    assert not (ROOT / "benchmarks" / "rehearsal.json").exists()


def test_figures_of_a_gpu_come_from_its_file(rehearsed, tmp_path):
    for file in (ROOT / "benchmarks").glob("*-*.json"):
        shutil.copy(file, tmp_path)
    text = "a\n" + "\n".join(f"<!-- {name} -->\nstale\n<!-- end -->" for name in tables.TABLES)
    before = tables.filled(text, tmp_path)
    assert "stale" not in before
    content = json.loads((rehearsed / "rehearsal.json").read_text())
    pools = {name: {"both_ratio": 0.25} for name in tables.POOLS}
    content["parts"]["pool"] = {"rows": {"2x64x320x150x26 float32": {"rows": pools}}}
    content["parts"]["batch"] = {"rows": {"small, none": {"largest": 6, "predicted": 7}}}
    content["parts"]["environment"] = {"rows": {"machine": {"device": "GPU 1", "torch": "2.11.0"}}}
    content["parts"]["callbacks"] = {
        "rows": {
            "all": {"median_step_seconds": 0.1},
            "without the meter": {"median_step_seconds": 0.099},
        }
    }
    run = {"dice": {"mean": 0.8912}, "steps": 900, "median_step_seconds": 0.02}
    content["parts"]["hippocampus"] = {
        "rows": {"fold 0": run | {"goal": 0.88, "seconds_to_goal": 61.0}}
    }
    (tmp_path / "gpu-1.json").write_text(json.dumps(content))
    after = tables.filled(text, tmp_path)
    for said in (
        "Measured on one GPU 1 (torch 2.11.0; `make gpu`).",
        "| `median` | 0.28x / 0.22x | 0.79x / 1.24x | 1 | 41 / 21 | 0.25x / not measured yet |",
        "| 6 (7) |",
        "Of a step of 100 ms on a GPU, the meter takes 1.0 %.",
        "a Dice of 0.88 reached after 61 s, 0.8912 at the end of 900 steps of 0.020 s.",
        "over 1 configurations, allocated memory is off by",
    ):
        assert said in after
        assert said not in before
    row = next(line for line in after.splitlines() if line.startswith("| as written |"))
    assert row.count(tables.OPEN) == 3  # the batch, and the large network
