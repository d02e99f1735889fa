import pytest
import torch

from unet3d.errors import UsageError
from unet3d.machine import device


def test_a_cpu_without_fast_bf16_falls_back_to_float32_with_a_reason(monkeypatch):
    monkeypatch.setattr(device, "has_fast_bf16", lambda: False)
    for requested in ("16", "bf16"):
        resolved = device.resolve_precision(requested, "cpu")
        assert (resolved.requested, resolved.used) == (requested, "32")
        assert "no fast" in resolved.reason


def test_a_cpu_with_fast_bf16_uses_it_for_half_precision(monkeypatch):
    monkeypatch.setattr(device, "has_fast_bf16", lambda: True)
    assert device.resolve_precision(16, "cpu").lightning == "bf16-mixed"
    assert device.resolve_precision("bf16", "cpu") == device.Precision("bf16", "bf16")


def test_a_torch_without_onednn_has_no_fast_bf16(monkeypatch):
    """On Apple's CPUs there is no operator to ask."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    assert not device.has_fast_bf16()


def test_true_fp16_is_rejected_on_a_cpu():
    with pytest.raises(UsageError, match="needs a GPU"):
        device.resolve_precision("16-true", "cpu")


@pytest.mark.parametrize("precision", [64, "half", None])
def test_an_unknown_precision_is_rejected_with_the_valid_ones(precision):
    with pytest.raises(UsageError, match="32, 16, bf16"):
        device.resolve_precision(precision, "cpu")


def test_a_missing_gpu_is_rejected(monkeypatch):
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    assert device.resolve_device("auto") == "cpu"
    with pytest.raises(UsageError, match="finds no CUDA device"):
        device.resolve_device("cuda")
    with pytest.raises(
        UsageError, match="device must be auto, cpu, cuda, cuda:N or mps, got 'gpu'"
    ):
        device.resolve_device("gpu", "device")


def test_a_gpu_is_chosen_by_its_number(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert device.resolve_device("cuda:1") == "cuda"
    for requested in ("cuda:1", "cuda", "cpu", "auto"):
        device.select_gpu(requested)
    assert chosen == [1]
    with pytest.raises(UsageError, match="cuda:2: torch finds 2 GPUs, and counts them from 0"):
        device.select_gpu("cuda:2")


def test_an_apple_gpu_runs_plain_modules_in_float32(monkeypatch):
    with pytest.raises(UsageError, match=r"trainer\.accelerator=mps needs a Mac with an Apple GPU"):
        device.resolve_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device.resolve_device("mps") == "mps"
    assert device.resolve_precision("16", "mps").used == "32"
    assert "without fused blocks" in device.describe_missing_kernels("mps")


def test_rocm_says_what_runs_slowly(monkeypatch):
    assert device.describe_missing_kernels("cuda") is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert device.describe_missing_kernels("cuda").startswith("ROCm: poolings and fused blocks")
