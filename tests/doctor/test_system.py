from types import SimpleNamespace

import torch

from unet3d.doctor import system
from unet3d.doctor.benchmark import describe_machine
from unet3d.doctor.system import Gpu, list_gpus
from unet3d.units import GIB


def test_a_systems_resources_are_plausible():
    resources = system.inspect_system()
    assert resources.cores >= 1
    assert resources.threads == 1  # set for tests
    assert 0 < resources.ram_free <= resources.ram
    assert 0 < resources.shm.free <= resources.shm.total < 2**20 * GIB
    installed = system.inspect_software()
    assert installed.torch == torch.__version__
    assert installed.packages["numpy"]
    assert installed.cpu_compiler
    assert installed.python_headers


def test_broken_or_missing_software_is_none(monkeypatch):
    def broken():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", broken)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    installed = system.inspect_software()
    assert installed.cudnn is installed.cpu_compiler is installed.triton_compiler is None
    assert installed.driver is None
    assert system.get_package_version("no-such-package") is None


def test_cudnns_number_becomes_a_version(monkeypatch):
    for number, expected in ((91002, "9.10.2"), (None, None)):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda number=number: number)
        assert system.get_cudnn_version() == expected


def test_the_driver_is_asked_for_its_version(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert system.get_driver_version() == "580.65.06"


def test_torch_reports_the_gpus(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA Fake", major=8, minor=6)
    functions = {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: properties,
        "mem_get_info": lambda device: (20 * GIB, 24 * GIB),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    assert list_gpus() == [
        Gpu(index=0, name="NVIDIA Fake", total=24 * GIB, free=20 * GIB, capability=(8, 6))
    ]
    assert describe_machine(torch.device("cuda"))["gpu"] == "NVIDIA Fake"
