from types import SimpleNamespace

import pytest
import torch

from unet3d.machine.gpus import Gpu, list_gpus
from unet3d.units import GIB


@pytest.fixture
def torch_gpu(monkeypatch):
    """Torch as on a machine with one GPU."""
    properties = SimpleNamespace(
        uuid="aaaa", name="NVIDIA Fake", total_memory=24 * GIB, major=8, minor=6
    )
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda device: properties,
        "mem_get_info": lambda device: (20 * GIB, 24 * GIB),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)


def test_without_nvidias_library_torch_reports_a_gpu(driver, torch_gpu):
    driver("libnone-such.so.1")
    assert list_gpus() == [
        Gpu(
            name="NVIDIA Fake",
            uuid="aaaa",
            index=0,
            total=24 * GIB,
            free=20 * GIB,
            capability=(8, 6),
            utilization=None,
            other_processes=None,
        )
    ]


def test_the_driver_reports_the_gpu_that_torch_sees_and_the_one_that_it_does_not(driver, torch_gpu):
    driver("new")
    assert [(gpu.uuid, gpu.index, gpu.total) for gpu in list_gpus()] == [
        ("GPU-aaaa", 0, 80 * GIB),
        ("MIG-bbbb", None, 10 * GIB),
    ]
