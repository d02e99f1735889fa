import pytest
import torch

from unet3d.commands.train import build_training
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.machine import Precision
from unet3d.text import MIB
from unet3d.training import machine_checks as machine
from unet3d.training.preflight import (
    check_cudnn,
    estimate_batch_bytes,
    estimate_checkpoint_bytes,
)
from unet3d.training.run import summarize_run


def test_a_checkpoint_is_as_large_as_estimated(composed, tmp_path):
    run = build_training(composed("fold=none"), tmp_path)
    estimate = estimate_checkpoint_bytes(run.module.model, Precision("32", "32"))
    run.trainer.fit(run.module, run.data.train_loader)
    written = (tmp_path / "checkpoints" / "last.ckpt").stat().st_size
    assert estimate <= written <= estimate + 0.1 * MIB
    half = estimate_checkpoint_bytes(run.module.model, Precision("bf16-true", "bf16-true"))
    assert 2 * half == estimate


def test_a_batch_is_as_large_as_estimated(composed, tmp_path):
    settings = composed("data.batch_size=2")
    batch = next(iter(build_training(settings, tmp_path).data.train_loader))
    nbytes = batch["image"].nbytes + batch["label"].nbytes
    assert estimate_batch_bytes(settings, with_margins=False) == nbytes
    rotated = composed("data.batch_size=2", "augmentation.rotation_p=1")
    rotated = estimate_batch_bytes(rotated, with_margins=True)
    assert 1.5 * nbytes < rotated < 6 * nbytes


def test_what_the_machine_lacks_is_in_the_summary(composed, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "list_nvidia_devices", lambda: [tmp_path / "nvidia0"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = build_training(composed("trainer.accelerator=auto"), tmp_path)
    assert str(tmp_path / "nvidia0") in summarize_run(run)


def test_a_small_dev_shm_stops_a_run_with_workers_before_its_data_is_read(
    composed, tmp_path, monkeypatch
):
    monkeypatch.setattr(machine, "get_free_shm", lambda: 4096)
    cache = f"data.cache={tmp_path / 'cache'}"
    with pytest.raises(UsageError, match=r"--shm-size=1g.* data\.num_workers=0"):
        build_training(composed("data.num_workers=2", cache), tmp_path)
    assert not (tmp_path / "cache").exists()
    build_training(composed(cache), tmp_path)


def test_a_full_disk_stops_a_run_before_its_data_is_read(composed, tmp_path, monkeypatch):
    usage = type(machine.shutil.disk_usage(tmp_path))(0, 0, MIB)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage)
    cache = tmp_path / "cache"
    with pytest.raises(UsageError, match=r"1 MiB .* 4 MiB"):
        build_training(composed(f"data.cache={cache}"), tmp_path)
    assert not cache.exists()


@pytest.mark.parametrize(
    "words", [["data.patch_size=[4096,4096,4096]"], ["data.batch_size=2000000000"]]
)
def test_a_step_that_fits_nowhere_ends_a_run_before_its_data_is_read(composed, tmp_path, words):
    cache = tmp_path / "cache"
    with pytest.raises(DoesNotFitError, match=r"lower data\.batch_size or data\.patch_size"):
        build_training(composed(*words, f"data.cache={cache}"), tmp_path)
    assert not cache.exists()


def test_a_cudnn_that_torch_avoids_is_reported_for_plain_modules_in_half_precision():
    problem = check_cudnn(91_002, half=True, is_fused=False)
    assert problem.message.startswith("cuDNN 9.10: torch computes half-precision 3D convolutions")
    assert not problem.is_fatal
    for cudnn, half, is_fused in (
        (91_002, False, False),
        (91_002, True, True),
        (90_701, True, False),
        (91_501, True, False),
        (None, True, False),
    ):
        assert check_cudnn(cudnn, half=half, is_fused=is_fused) is None
