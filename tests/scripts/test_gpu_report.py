"""The GPU report without a GPU: what interruptions cost, and what a rehearsal writes."""

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from scripts.bench.step import list_variants
from scripts.gpu import report, steps
from scripts.gpu.parts import Part, summarize_checks
from scripts.gpu.rows import Context

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


def make_part(limit_seconds):
    return Part(
        module="", about="", limit_seconds=limit_seconds, min_seconds=0, summary=summarize_checks
    )


def test_rows_survive_crashes_errors_and_time_limits_of_others(make_call):
    result = {}
    report.run_part("part", make_part(3), result, make_call())
    assert list(result["rows"]) == ["first"]
    assert {name: error.split(":")[0] for name, error in result["failed"].items()} == {
        "crashes": "exit code -6",
        "raises": "CUDA error",
        "hangs": "over the limit of 3 s",
    }
    assert result["state"] == "cut off"
    report.run_part("part", make_part(3), result, make_call())
    assert list(result["rows"]) == ["first", "last"]
    assert result["state"] == "failed"
    assert result["summary"] == {"good": 2, "bad": []}


def test_a_worker_that_cannot_start_gives_the_reason(make_call, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit('no such module')")
    result = {}
    report.run_part("part", make_part(3), result, make_call(worker))
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


def test_networks_are_tuned_as_their_users_run_them(monkeypatch, tmp_path):
    seen = []

    def compile_eagerly(model):
        seen.append((torch.backends.cudnn.benchmark, model[1].weight.is_contiguous()))
        model._compiled_call_impl = torch.compile(model._call_impl, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)
    layers = partial(nn.Conv3d, kernel_size=3, padding=1)
    networks = list_variants("net", lambda: nn.Sequential(layers(1, 4), layers(4, 5)))
    context = Context(
        device=torch.device("cpu"), tiny=True, deadline=0, scratch=tmp_path, data=tmp_path
    )
    for make in networks.values():
        row = steps.measure_tuned(context, make, [8, 8, 8])
        assert row["step_seconds"] > 0
    assert seen == [(True, True), (True, False)]  # compiled, and also channels-last
    assert not torch.backends.cudnn.benchmark


def test_a_rehearsal_measures_on_a_cpu_and_writes_nothing_to_benchmarks(rehearsed):
    content = json.loads((rehearsed / "rehearsal.json").read_text())
    assert content["device"] == "rehearsal"
    assert {part["state"] for part in content["parts"].values()} == {"done"}
    assert content["parts"]["forum"]["rows"]["small, as written"]["step_seconds"] > 0
    assert content["parts"]["predict"]["summary"]["allocated"]["median_percent"] > 0
    (tuned,) = content["parts"]["tuned"]["rows"].items()
    assert tuned[0] == "nnU-Net PlainConvUNet, channels-last"
    assert tuned[1]["step_seconds"] > 0
    assert "predicted" not in tuned[1]
    trace = content["parts"]["callbacks"]["rows"]["trace of prefetching"]
    assert trace["prefetch_us"] > 0
    assert content["parts"]["nccl"]["summary"] == {"good": 1, "bad": []}
    assert not (ROOT / "benchmarks" / "rehearsal.json").exists()
