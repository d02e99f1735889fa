import os
from types import SimpleNamespace

import pytest
import torch

from unet3d import nvml
from unet3d.units import GIB

FIRST, SLICE = "GPU-aaaa", "MIG-bbbb"


def test_version_and_gpus_are_read_from_the_driver(driver):
    driver("new")
    assert (nvml.get_driver_version(), nvml.get_max_cuda_version()) == ("580.65.06", "13.1")
    assert nvml.list_gpu_uuids() == [FIRST, SLICE]
    assert nvml.get_gpu_name(FIRST) == "NVIDIA Made Up"
    assert nvml.get_compute_capability(FIRST) == (9, 0)
    assert nvml.get_memory(FIRST) == nvml.Memory(total=80 * GIB, free=60 * GIB)


def test_utilization_is_known_of_full_gpus_and_not_of_slices(driver):
    driver("new")
    assert nvml.get_utilization(FIRST) == 87
    assert nvml.get_utilization(SLICE) is None


def test_processes_are_listed_with_the_largest_memory_first(driver):
    driver("new")
    assert nvml.list_processes(FIRST) == [
        nvml.Process(pid=4242, name="/usr/bin/viewer", used=16 * GIB),
        nvml.Process(pid=os.getpid(), name=None, used=3 * GIB),
        nvml.Process(pid=77, name=None, used=None),
    ]
    assert nvml.get_process_bytes(FIRST) == 3 * GIB
    assert nvml.list_processes(SLICE) == []
    assert nvml.get_process_bytes(SLICE) is None


@pytest.mark.parametrize(("uuid", "name"), [("aaaa", "Made Up"), ("bbbb", "1g.10gb")])
def test_torchs_device_is_found_by_its_uuid_whatever_its_index(driver, monkeypatch, uuid, name):
    driver("new")
    properties = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert nvml.get_gpu_name(torch.device("cuda", 5)).endswith(name)


def test_values_unknown_to_an_old_driver_are_none(driver):
    driver("old")
    assert nvml.get_driver_version() == "580.65.06"
    assert nvml.get_memory(FIRST).total == 80 * GIB
    assert nvml.list_gpu_uuids() == []
    for query in (
        nvml.get_compute_capability,
        nvml.get_utilization,
        nvml.list_processes,
        nvml.get_process_bytes,
    ):
        assert query(FIRST) is None


@pytest.mark.parametrize("kind", ["broken", "libnone-such.so.1", "libm.so.6"])
def test_without_a_driver_nothing_is_known_and_nothing_fails(driver, kind):
    driver(kind)
    assert (nvml.get_driver_version(), nvml.get_max_cuda_version(), nvml.list_gpu_uuids()) == (
        None,
        None,
        [],
    )
    for device in (FIRST, torch.device("cuda", 0)):
        for query in (
            nvml.get_gpu_name,
            nvml.get_memory,
            nvml.get_utilization,
            nvml.list_processes,
        ):
            assert query(device) is None


def test_a_cpu_or_an_unknown_uuid_has_no_memory(driver):
    driver("new")
    assert nvml.get_memory(torch.device("cpu")) is None
    assert nvml.get_memory("GPU-none-such") is None


@pytest.mark.gpu
def test_a_real_driver_agrees_with_torch():
    gpu = torch.device("cuda", 0)
    assert nvml.get_driver_version()
    assert nvml.get_gpu_name(gpu) == torch.cuda.get_device_name(gpu)
    assert nvml.get_compute_capability(gpu) == torch.cuda.get_device_capability(gpu)
    assert nvml.get_memory(gpu).total >= torch.cuda.get_device_properties(gpu).total_memory
    percent = nvml.get_utilization(gpu)
    assert percent is None or 0 <= percent <= 100
