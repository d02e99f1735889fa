import os
from types import SimpleNamespace

import pytest
import torch

from unet3d import nvml

GPU = torch.device("cuda", 0)


class Bindings(SimpleNamespace):
    """NVIDIA's bindings, with a GPU that this process uses."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-aaaa":
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=87)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        ids = {1: None, os.getpid(): 2**30}
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in ids.items()]


@pytest.fixture
def bind(monkeypatch):
    """Return a function that gives torch a GPU, and this process the bindings."""

    def bind(uuid):
        properties = SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(nvml, "pynvml", Bindings())

    nvml._get_handle.cache_clear()
    yield bind
    nvml._get_handle.cache_clear()


def test_the_driver_reports_utilization_and_the_memory_of_this_process(bind):
    bind("aaaa")
    assert nvml.get_utilization(GPU) == 87
    assert nvml.get_process_bytes(GPU) == 2**30
    assert nvml.get_utilization(torch.device("cpu")) is None


def test_what_the_driver_does_not_know_is_none(bind, monkeypatch):
    bind("bbbb")
    assert nvml.get_utilization(GPU) is nvml.get_process_bytes(GPU) is None
    monkeypatch.setattr(nvml, "pynvml", None)  # not installed
    assert nvml.get_utilization(GPU) is None


@pytest.mark.gpu
def test_a_gpu_is_queried_where_the_bindings_are_installed():
    pytest.importorskip("pynvml")
    torch.ones(1, device=GPU)
    assert 0 <= nvml.get_utilization(GPU) <= 100
    used = nvml.get_process_bytes(GPU)
    assert used is None or used > 2**27  # containers hide ids
