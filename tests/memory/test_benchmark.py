"""`unet3d doctor benchmark=true`."""

import json

import pytest
import torch

from unet3d.__main__ import main
from unet3d.memory import benchmark

TINY = [
    *("data.patch_size=[8,8,8]", "model.depth=2", "model.width=4", "data.batch_size=1"),
    *("trainer.accelerator=cpu", "benchmark=true"),
]


@pytest.mark.slow
def test_strategies_are_measured_and_wrong_gradients_and_errors_are_failures(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    original, compute, calls = benchmark.measure_strategy, benchmark.compute_gradients, []

    def spoil(*arguments):
        calls.append(1)
        return compute(*arguments) * (1 + 0.01 * (len(calls) == 3))

    def fails(settings, device):
        if settings.strategy == "skips":
            raise RuntimeError("no kernel image is available for execution on the device")
        if settings.strategy == "none":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(settings, device)

    monkeypatch.setattr(benchmark, "compute_gradients", spoil)
    monkeypatch.setattr(benchmark, "measure_strategy", fails)
    assert main(["doctor", *TINY]) == 1
    result = json.loads((tmp_path / "unet3d-benchmark-cpu.json").read_text())
    shown = capsys.readouterr().out
    assert result["schema"] == "unet3d-benchmark-1"
    rows = {row["name"]: row for row in result["rows"]}
    strategies = ["none", "fused", "skips", "lean", "leanest"]
    assert list(rows) == ["gradients, fused", "gradients, lean", *strategies]
    assert rows["skips"]["error"].startswith("RuntimeError: no kernel image is available")
    assert benchmark.list_failures(result["rows"]) == ["gradients, fused", "skips"]
    assert rows["lean"]["step_seconds"] >= rows["lean"]["host_seconds"] > 0
    assert rows["fused"]["estimated"]["allocated"] > 0
    assert rows["fused"]["measured"]["resident"] > 0
    assert "gradients, fused: LESS ACCURATE than plain modules, relative error 1e-02" in shown
    assert "gradients, lean: ok, relative error" in shown
    assert "checkpointing=leanest: " in shown
    assert "wrote unet3d-benchmark-cpu.json: attach it to an issue" in shown
