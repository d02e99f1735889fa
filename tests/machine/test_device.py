import pytest

from unet3d.errors import UsageError
from unet3d.machine import device


def test_a_cpu_without_fast_bf16_computes_half_in_float32_and_says_so(monkeypatch):
    monkeypatch.setattr(device, "has_fast_bf16", lambda: False)
    for asked in ("16", "bf16"):
        resolved = device.resolve_precision(asked, "cpu")
        assert (resolved.asked, resolved.used) == (asked, "32")
        assert "no fast" in resolved.why


def test_a_cpu_with_fast_bf16_computes_half_in_bf16(monkeypatch):
    monkeypatch.setattr(device, "has_fast_bf16", lambda: True)
    assert device.resolve_precision(16, "cpu").lightning == "bf16-mixed"
    assert device.resolve_precision("bf16", "cpu") == device.Precision("bf16", "bf16")


def test_pure_fp16_is_refused_on_a_cpu():
    with pytest.raises(UsageError, match="needs a GPU"):
        device.resolve_precision("16-true", "cpu")


@pytest.mark.parametrize("asked", [64, "half", None])
def test_an_unknown_precision_is_refused_with_the_known_ones(asked):
    with pytest.raises(UsageError, match="32, 16, bf16"):
        device.resolve_precision(asked, "cpu")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    assert device.resolve_device("auto") == "cpu"
    with pytest.raises(UsageError, match="finds no CUDA device"):
        device.resolve_device("gpu")
