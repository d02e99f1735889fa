import torch

from unet3d.machine import preflight, software


def test_versions_and_compilers_are_found():
    installed = software.inspect_software()
    assert installed.torch == torch.__version__
    assert installed.packages["numpy"]
    assert installed.gloo
    assert installed.cpu_compiler
    assert installed.python_headers


def test_broken_or_missing_software_is_none(monkeypatch):
    def broken():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", broken)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    installed = software.inspect_software()
    assert installed.cudnn is installed.cpu_compiler is installed.triton_compiler is None
    assert software.get_package_version("no-such-package") is None


def test_cudnns_number_becomes_a_version(monkeypatch):
    for number, expected in ((8902, "8.9.2"), (91002, "9.10.2"), (None, None)):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda number=number: number)
        assert software.get_cudnn_version() == expected


def test_a_gpu_without_kernels_in_torch_stops_a_run():
    def check(capability):
        architectures = ["sm_80", "sm_90", "sm_90a"]
        return preflight.check_gpu_arch(
            "2.13.0", architectures, gpu="Tesla V100", capability=capability
        )

    assert check((8, 9)) is None
    assert check((7, 0)).is_fatal
    assert "no kernels for Tesla V100 (sm_70), only for sm_80" in check((7, 0)).message


def test_a_driver_older_than_torchs_cuda_is_reported():
    def check(runs, cuda="13.0"):
        return preflight.check_driver(cuda, driver="535.1", runs=runs)

    assert "supports CUDA 12.2 at most, but torch is built for CUDA 13.0" in check("12.2").message
    assert check("13.0") is check(None) is check("12.2", None) is check("12.2", "12.8") is None


def test_missing_requirements_of_triton_are_reported():
    assert preflight.check_triton("3.9", compiler="/usr/bin/gcc", headers=True) is None
    assert "not installed" in preflight.check_triton(None, compiler="gcc", headers=True).message
    message = preflight.check_triton("3.9", compiler=None, headers=False).message
    assert "a C compiler (gcc, or CC=...) and Python's headers" in message
