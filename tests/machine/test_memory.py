import pytest
import torch

from unet3d import nvml
from unet3d.machine.memory import get_available_bytes, get_free_bytes, read_meminfo
from unet3d.units import CUDA_CONTEXT_BYTES, GIB


def test_a_cpus_available_memory_is_plausible():
    available = get_available_bytes(torch.device("cpu"))
    assert available is None or 2**20 < available < 2**50


def test_without_proc_meminfo_nothing_is_known(tmp_path):
    assert read_meminfo(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("process_bytes", "expected"), [(3 * GIB, 13 * GIB), (None, 12 * GIB + CUDA_CONTEXT_BYTES)]
)
def test_a_gpu_offers_what_is_free_and_what_this_process_holds(
    monkeypatch, process_bytes, expected
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(nvml, "get_process_bytes", lambda device: process_bytes)
    assert get_available_bytes(torch.device("cuda", 0)) == expected


def test_memory_in_torchs_cache_is_free_for_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    assert get_free_bytes(torch.device("cuda", 0)) == 12 * GIB


def test_an_empty_gpu_offers_no_more_than_it_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(nvml, "get_process_bytes", lambda device: None)
    assert get_available_bytes(torch.device("cuda", 0)) == 24 * GIB
