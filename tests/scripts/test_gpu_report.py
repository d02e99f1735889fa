"""The GPU report without a GPU: what interruptions cost, and what a rehearsal writes."""

import json
import time
from pathlib import Path

import pytest

from scripts.gpu import report
from scripts.gpu.parts import Part

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "helpers" / "fake_gpu_worker.py"


@pytest.fixture
def make_call(tmp_path):
    def make(worker=WORKER):
        return report.Call(
            device="cpu",
            tiny=False,
            deadline=time.time() + 60,
            scratch=tmp_path,
            data=tmp_path,
            save=lambda: None,
            worker=[str(worker)],
        )

    return make


def test_rows_survive_crashes_errors_and_time_limits_of_others(make_call):
    result = {}
    report.run_part("part", Part("", "", limit_seconds=3, min_seconds=0), result, make_call())
    assert list(result["rows"]) == ["first"]
    assert {name: error.split(":")[0] for name, error in result["failed"].items()} == {
        "crashes": "exit code -6",
        "raises": "CUDA error",
        "hangs": "over the limit of 3 s",
    }
    assert result["state"] == "cut off"
    report.run_part("part", Part("", "", limit_seconds=3, min_seconds=0), result, make_call())
    assert list(result["rows"]) == ["first", "last"]
    assert result["state"] == "failed"


def test_a_worker_that_cannot_start_gives_the_reason(make_call, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit('no such module')")
    result = {}
    report.run_part("part", Part("", "", limit_seconds=3, min_seconds=0), result, make_call(worker))
    assert result["state"] == "failed"
    assert "no such module" in result["failed"]["(start)"]


def test_finished_parts_are_skipped_and_those_cut_off_are_not():
    parts = {"tests": {"state": "done"}, "pool": {"state": "failed"}, "forum": {"state": "cut off"}}
    unfinished = set(report.list_unfinished(parts))
    assert not {"tests", "pool"} & unfinished
    assert {"forum", "predict"} <= unfinished


def test_without_a_gpu_the_report_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr(report, "get_device_name", lambda: None)
    assert report.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Measure five parts of the report in their smallest form on the CPU; return the parts."""
    folder = tmp_path_factory.mktemp("rehearsed")
    parts = ["forum", "predict", "tuned", "lightning", "nccl"]
    assert report.main(["--rehearse", "--output", str(folder), *parts]) == 0
    content = json.loads((folder / "rehearsal.json").read_text())
    assert content["device"] == "rehearsal"
    return content["parts"]


@pytest.mark.long
def test_a_rehearsal_measures_all_parts_on_a_cpu(rehearsed):
    assert {part["state"] for part in rehearsed.values()} == {"done"}
    assert rehearsed["forum"]["rows"]["small, plain modules"]["step_seconds"] > 0
    (row,) = rehearsed["predict"]["rows"].values()
    assert "allocated_error_percent" in row
    (tuned,) = rehearsed["tuned"]["rows"].items()
    assert tuned[0] == "nnU-Net PlainConvUNet, channels-last"
    assert "predicted" not in tuned[1]
    assert rehearsed["lightning"]["rows"]["fused"]["peak"]
    assert rehearsed["nccl"]["rows"]["trains"]["good"]
    assert not (ROOT / "benchmarks" / "rehearsal.json").exists()
