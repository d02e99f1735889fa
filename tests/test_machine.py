"""Devices, precisions and memory of this machine."""

import pytest
import torch

from unet3d import machine
from unet3d.errors import UsageError
from unet3d.machine import (
    CUDA_CONTEXT_BYTES,
    get_available_bytes,
    get_free_bytes,
    read_meminfo,
)
from unet3d.text import GIB


def test_a_cpu_computes_half_precision_in_bf16_or_says_why_not(monkeypatch):
    monkeypatch.setattr(machine, "has_fast_bf16", lambda: True)
    assert machine.resolve_precision("16", "cpu").used == "bf16"
    assert machine.resolve_precision("bf16", "cpu") == machine.Precision("bf16", "bf16")
    monkeypatch.setattr(machine, "has_fast_bf16", lambda: False)
    resolved = machine.resolve_precision("bf16", "cpu")
    assert resolved.used == "32"
    assert "no fast" in resolved.reason


def test_a_missing_gpu_is_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.resolve_device("auto") == "cpu"
    with pytest.raises(UsageError, match="finds no CUDA device"):
        machine.resolve_device("cuda")


def test_a_gpu_is_chosen_by_its_number(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert machine.resolve_device("cuda:1") == "cuda"
    for requested in ("cuda:1", "cuda", "cpu", "auto"):
        machine.select_gpu(requested)
    assert chosen == [1]
    with pytest.raises(UsageError, match="cuda:2: torch finds 2 GPUs, and counts them from 0"):
        machine.select_gpu("cuda:2")


def test_an_apple_gpu_and_rocm_say_what_they_run_without(monkeypatch):
    with pytest.raises(UsageError, match=r"trainer\.accelerator=mps needs a Mac with an Apple GPU"):
        machine.resolve_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert machine.resolve_device("mps") == "mps"
    assert machine.resolve_precision("16", "mps").used == "32"
    assert "without fused blocks" in machine.describe_missing_kernels("mps")
    assert machine.describe_missing_kernels("cuda") is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert machine.describe_missing_kernels("cuda").startswith("ROCm: poolings and fused blocks")


@pytest.mark.parametrize(
    ("free", "expected"), [(10, 12 * GIB + CUDA_CONTEXT_BYTES), (24, 24 * GIB)]
)
def test_a_gpu_offers_what_is_free_and_what_this_process_holds(monkeypatch, free, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 * GIB)
    assert get_available_bytes(torch.device("cuda", 0)) == expected
    assert get_free_bytes(torch.device("cuda", 0)) == (free + 1) * GIB


def test_other_systems_have_a_name_without_proc(monkeypatch, tmp_path):
    assert read_meminfo(tmp_path / "none") == {}
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(machine.platform, "processor", str)
    assert machine.get_cpu_model() is None
