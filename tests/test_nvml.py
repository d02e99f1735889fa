import os
from types import SimpleNamespace

import pytest
import torch

from unet3d import nvml
from unet3d.units import GIB

FIRST, SLICE = "GPU-aaaa", "MIG-bbbb"


def test_a_driver_tells_its_version_and_the_gpus_it_shows(driver):
    driver("new")
    assert (nvml.get_driver_version(), nvml.get_max_cuda_version()) == ("580.65.06", "13.1")
    assert nvml.list_gpu_uuids() == [FIRST, SLICE]
    assert nvml.get_gpu_name(FIRST) == "NVIDIA Made Up"
    assert nvml.get_compute_capability(FIRST) == (9, 0)
    assert nvml.memory(FIRST) == nvml.Memory(total=80 * GIB, free=60 * GIB)


def test_how_busy_a_gpu_is_is_told_of_a_whole_one_alone(driver):
    driver("new")
    assert nvml.get_utilization(FIRST) == 87
    assert nvml.get_utilization(SLICE) is None


def test_who_holds_memory_is_told_with_the_largest_first(driver):
    driver("new")
    assert nvml.list_processes(FIRST) == [
        nvml.Process(pid=4242, name="/usr/bin/viewer", used=16 * GIB),
        nvml.Process(pid=os.getpid(), name=None, used=3 * GIB),
        nvml.Process(pid=77, name=None, used=None),
    ]
    assert nvml.process_bytes(FIRST) == 3 * GIB
    assert nvml.list_processes(SLICE) == []
    assert nvml.process_bytes(SLICE) is None


@pytest.mark.parametrize(("uuid", "name"), [("aaaa", "Made Up"), ("bbbb", "1g.10gb")])
def test_torchs_device_is_found_by_its_uuid_whatever_number_it_has(driver, monkeypatch, uuid, name):
    driver("new")
    properties = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert nvml.get_gpu_name(torch.device("cuda", 5)).endswith(name)


def test_what_an_old_driver_does_not_know_is_none(driver):
    driver("old")
    assert nvml.get_driver_version() == "580.65.06"
    assert nvml.memory(FIRST).total == 80 * GIB
    assert nvml.list_gpu_uuids() == []
    for question in (
        nvml.get_compute_capability,
        nvml.get_utilization,
        nvml.list_processes,
        nvml.process_bytes,
    ):
        assert question(FIRST) is None


@pytest.mark.parametrize("kind", ["broken", "libnone-such.so.1", "libm.so.6"])
def test_without_a_driver_nothing_is_known_and_nothing_fails(driver, kind):
    driver(kind)
    assert (nvml.get_driver_version(), nvml.get_max_cuda_version(), nvml.list_gpu_uuids()) == (
        None,
        None,
        [],
    )
    for device in (FIRST, torch.device("cuda", 0)):
        for question in (nvml.get_gpu_name, nvml.memory, nvml.get_utilization, nvml.list_processes):
            assert question(device) is None


def test_a_cpu_is_no_gpu(driver):
    driver("new")
    assert nvml.memory(torch.device("cpu")) is None
    assert nvml.memory("GPU-none-such") is None


@pytest.mark.gpu
def test_a_real_driver_tells_what_torch_tells():
    gpu = torch.device("cuda", 0)
    assert nvml.get_driver_version()
    assert nvml.get_gpu_name(gpu) == torch.cuda.get_device_name(gpu)
    assert nvml.get_compute_capability(gpu) == torch.cuda.get_device_capability(gpu)
    assert nvml.memory(gpu).total >= torch.cuda.get_device_properties(gpu).total_memory
    percent = nvml.get_utilization(gpu)
    assert percent is None or 0 <= percent <= 100
