import os
from types import SimpleNamespace

import pytest
import torch

from unet3d import nvml

GPU = torch.device("cuda", 0)


class NVMLError(Exception):
    pass


def get_handle(uuid):
    if uuid != "GPU-aaaa":
        raise NVMLError
    return uuid


PROCESSES = [SimpleNamespace(pid=1, usedGpuMemory=None)]
PROCESSES += [SimpleNamespace(pid=os.getpid(), usedGpuMemory=2**30)]
BINDINGS = SimpleNamespace(
    NVMLError=NVMLError,
    nvmlInit=lambda: None,
    nvmlDeviceGetHandleByUUID=get_handle,
    nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=87),
    nvmlDeviceGetComputeRunningProcesses=lambda handle: PROCESSES,
)


@pytest.mark.parametrize(
    ("bindings", "uuid", "utilization", "nbytes"),
    [(BINDINGS, "aaaa", 87, 2**30), (BINDINGS, "unknown", None, None), (None, "aaaa", None, None)],
)
def test_the_driver_reports_a_known_gpu_where_the_bindings_are_installed(
    bindings, uuid, utilization, nbytes, monkeypatch
):
    properties = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(nvml, "pynvml", bindings)
    nvml._get_handle.cache_clear()
    assert nvml.get_utilization(GPU) == utilization
    assert nvml.get_process_bytes(GPU) == nbytes
    assert nvml.get_utilization(torch.device("cpu")) is None
    nvml._get_handle.cache_clear()


@pytest.mark.gpu
def test_a_gpu_is_queried_where_the_bindings_are_installed():
    pytest.importorskip("pynvml")
    torch.ones(1, device=GPU)
    assert 0 <= nvml.get_utilization(GPU) <= 100
    used = nvml.get_process_bytes(GPU)
    assert used is None or used > 2**27  # containers hide ids
