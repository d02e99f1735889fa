"""The GPU report without a GPU: what interruptions cost, and what a rehearsal writes."""

import json
import os
import time

import pytest

from scripts.gpu import report, rows


def test_without_a_gpu_the_report_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr(report, "get_device_name", lambda: None)
    assert report.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def interrupted(context):
    """Rows of a part of the report, in a process of their own."""
    return {
        "first": dict,
        "crashes": os.abort,
        "raises": lambda: exec("raise RuntimeError('CUDA error')"),
        "hangs": lambda: time.sleep(60),
        "last": dict,
    }


@pytest.mark.long
def test_rows_survive_crashes_errors_and_time_limits_of_others(tmp_path):
    path, parts = tmp_path / "gpu.json", {}
    empty = {"state": "cut off", "rows": {}, "failed": {}}
    path.write_text(json.dumps({"parts": {"interrupted": empty, "missing": empty}}))
    for name in ("interrupted", "interrupted", "missing"):
        part = report.Part("tests.scripts.test_gpu_report", "", limit_seconds=25, min_seconds=0)
        report.run_part(path, name, part, "meta", time.time() + 60)
        parts = rows.read_parts(path)
    result = parts["interrupted"]
    assert list(result["rows"]) == ["first", "last"]
    assert {name: error.split(":")[0] for name, error in result["failed"].items()} == {
        "crashes": "exit code -6",
        "raises": "RuntimeError",
        "hangs": "over the limit of 25 s",
    }
    assert result["state"] == "failed"
    assert "missing" in parts["missing"]["failed"]["(start)"]


@pytest.mark.long
def test_a_rehearsal_measures_all_parts_on_a_cpu(tmp_path):
    assert report.main(["--rehearse", "--output", str(tmp_path)]) == 0
    parts = rows.read_parts(tmp_path / "rehearsal.json")
    assert {name: part["state"] for name, part in parts.items()} == dict.fromkeys(
        report.PARTS, "done"
    )
    assert parts["forum"]["rows"]["small, plain modules"]["step_seconds"] > 0
    assert "allocated_error_percent" in next(iter(parts["predict"]["rows"].values()))
    (tuned,) = parts["tuned"]["rows"].items()
    assert tuned[0] == "nnU-Net PlainConvUNet, channels-last"
    assert "predicted" not in tuned[1]
    assert parts["lightning"]["rows"]["fused"]["peak"]
    assert not (report.BENCHMARKS / "rehearsal.json").exists()
