import pytest

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
        device.resolve_device("gpu")
