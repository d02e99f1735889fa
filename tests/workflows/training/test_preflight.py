import pytest
import torch

from unet3d.data.augmentation.pipeline import Augment
from unet3d.errors import UsageError
from unet3d.machine import preflight as machine
from unet3d.machine.device import Precision
from unet3d.units import MIB
from unet3d.workflows.training.build import build_training, summarize_run
from unet3d.workflows.training.preflight import estimate_batch_bytes, estimate_checkpoint_bytes


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_checkpoint_is_as_large_as_it_is_said_to_be(composed, tmp_path, optimizer):
    request = composed(f"optimizer={optimizer}", "fold=none")
    said = estimate_checkpoint_bytes(request, Precision("32", "32"))
    run = build_training(request, tmp_path)
    run.trainer.fit(run.task, run.train_loader)
    written = (tmp_path / "checkpoints" / "last.ckpt").stat().st_size
    assert said <= written <= said + 0.1 * MIB


def test_a_batch_is_as_large_as_it_is_said_to_be(composed, tmp_path):
    request = composed("data.batch_size=2")
    batch = next(iter(build_training(request, tmp_path).train_loader))
    found = batch["image"].nbytes + batch["label"].nbytes
    assert estimate_batch_bytes(request, 1, Augment(), sources=False) == found
    larger = estimate_batch_bytes(request, 1, Augment(rotation_p=1), sources=True)
    assert 1.5 * found < larger < 6 * found


def test_what_a_machine_lacks_stands_in_the_introduction(composed, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "nvidia_devices", lambda: [tmp_path / "nvidia0"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = build_training(composed("trainer.accelerator=auto"), tmp_path)
    assert "nvidia0 is there" in summarize_run(run)


def test_a_small_dev_shm_stops_a_run_with_workers_before_its_data_is_read(
    composed, tmp_path, monkeypatch
):
    monkeypatch.setattr(machine, "get_free_shm", lambda: 4096)
    cache = f"data.cache={tmp_path / 'cache'}"
    with pytest.raises(UsageError, match=r"--shm-size=1g, or give data\.num_workers=0"):
        build_training(composed("data.num_workers=2", cache), tmp_path)
    assert not (tmp_path / "cache").exists()
    build_training(composed(cache), tmp_path)


def test_a_full_disk_stops_a_run_before_its_data_is_read(composed, tmp_path, monkeypatch):
    usage = type(machine.shutil.disk_usage(tmp_path))(0, 0, MIB)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match="1 MiB left, and checkpoints take 4 MiB"):
        build_training(composed(), tmp_path)
