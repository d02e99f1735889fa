"""What a run checks before it reads its data."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unet3d.commands.train import build_training
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.memory.estimate import UntraceableError, add_context_bytes
from unet3d.text import MIB
from unet3d.training import preflight
from unet3d.training.preflight import (
    check_cudnn,
    check_torch_build,
    check_writable,
    estimate_run_memory,
)


@pytest.mark.parametrize(
    ("word", "error", "message"),
    [
        ("data.num_workers=2", UsageError, r"--shm-size=1g .* data\.num_workers=0"),
        ("data.patch_size=[4096,4096,4096]", DoesNotFitError, r"lower data\.batch_size or"),
    ],
)
def test_what_cannot_run_ends_before_data_is_read(
    composed, tmp_path, monkeypatch, word, error, message
):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(error, match=message):
        build_training(composed(word, f"data.cache={tmp_path / 'cache'}"), tmp_path)
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_is_not_writable_is_reported_before_it_is_needed(tmp_path):
    assert check_writable(tmp_path / "not" / "there") is None
    problem = check_writable(Path("/proc/self/not/there"))
    assert problem.is_fatal
    assert "/proc/self is not writable" in problem.message


@pytest.mark.parametrize(("cuda", "text"), [("12.8", "finds no GPU"), (None, "built without CUDA")])
def test_a_gpu_that_torch_does_not_find_is_reported(monkeypatch, cuda, text):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert text in check_torch_build([Path("/dev/nvidia0")]).message
    assert check_torch_build([]) is None


def test_a_cudnn_that_torch_avoids_is_reported():
    problem = check_cudnn(91_002)
    assert problem.message.startswith("cuDNN 9.10: torch computes half-precision 3D convolutions")
    assert not problem.is_fatal
    assert all(check_cudnn(version) is None for version in (90_701, 91_501, None))


@pytest.mark.slow
def test_tiles_of_a_gpu_are_as_large_as_its_free_memory_allows(composed, tmp_path, monkeypatch):
    words = ("model.depth=2", "model.width=64", "data.patch_size=[96,96,96]")
    run = build_training(composed(*words, "memory.estimate=true"), tmp_path)
    run.data.device, tiles, available = torch.device("cuda"), [], 2**40
    configured = run.module.model.retention
    monkeypatch.setattr(preflight, "get_available_bytes", lambda device: available)
    monkeypatch.setattr(preflight, "check_memory", lambda *_, **__: [])
    for _ in range(4):
        run.module.model.retention = configured
        estimate, notes = estimate_run_memory(run.data, run.precision, run.module)
        tile_bytes = run.module.model.retention.tile_bytes
        tiles.append(None if tile_bytes is None else tile_bytes // MIB)
        assert notes[0] == f"checkpointing.tile_mib=auto: using {tiles[-1]}" or tile_bytes is None
        available = add_context_bytes(estimate.peak) - 1
    assert tiles == [2048, 256, None, 16]


def test_tiles_stay_as_configured_where_a_step_cannot_be_estimated(composed, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise UntraceableError("it reads values")

    run = build_training(composed("memory.estimate=true"), tmp_path)
    run.data.device, configured = torch.device("cuda"), run.module.model.retention
    monkeypatch.setattr(preflight, "get_available_bytes", lambda device: 2**40)
    monkeypatch.setattr(preflight, "estimate_resolved_step", refuse)
    assert estimate_run_memory(run.data, run.precision, run.module) == (None, ["it reads values"])
    assert run.module.model.retention == configured
