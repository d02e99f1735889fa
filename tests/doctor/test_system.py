import torch

from unet3d.doctor import system
from unet3d.text import GIB


def test_a_systems_resources_are_plausible(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    resources = system.inspect_system()
    assert resources.cores >= 1
    assert resources.threads == 1  # set for tests
    assert 0 < resources.ram_free <= resources.ram
    assert 0 < resources.shm.free <= resources.shm.total < 2**20 * GIB
    installed = system.inspect_software()
    assert installed.torch == torch.__version__
    assert installed.cudnn == "9.10.2"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert system.get_cudnn_version() is None
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


def test_the_driver_is_asked_for_its_version(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert system.get_driver_version() == "580.65.06"
