"""What a run checks before it reads its data."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unet3d import machine
from unet3d.commands.train import build_training
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.training import machine_checks
from unet3d.training.machine_checks import check_cudnn, check_torch_build, check_writable


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
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
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


@pytest.mark.parametrize(("depth", "used"), [(3, "bf16"), (4, "32")])
def test_bf16_is_avoided_where_torch_would_compute_wrong_gradients(
    composed, tmp_path, monkeypatch, depth, used
):
    monkeypatch.setattr(machine, "has_fast_bf16", lambda: True)
    words = ("precision=16", "data.patch_size=[16,16,16]", f"model.depth={depth}")
    run = build_training(composed(*words), tmp_path)
    assert run.precision.used == used
    assert ("where maps are shorter than a kernel" in run.precision.reason) == (used == "32")
