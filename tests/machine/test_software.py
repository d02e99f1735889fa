import torch

from unet3d.machine import preflight, software


def test_versions_and_compilers_are_told():
    found = software.inspect_software()
    assert found.torch == torch.__version__
    assert found.packages["numpy"]
    assert found.gloo
    assert found.cpu_compiler
    assert found.python_headers


def test_what_is_broken_or_missing_is_none(monkeypatch):
    def broken():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", broken)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    found = software.inspect_software()
    assert found.cudnn is found.cpu_compiler is found.triton_compiler is None
    assert software.get_package_version("no-such-package") is None


def test_cudnns_number_is_read_as_its_version(monkeypatch):
    for number, said in ((8902, "8.9.2"), (91002, "9.10.2"), (None, None)):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda number=number: number)
        assert software.cudnn() == said


def test_a_gpu_that_torch_has_no_kernels_for_stops_a_run():
    def lack(capability):
        known = ["sm_80", "sm_90", "sm_90a"]
        return preflight.check_gpu_arch("2.13.0", known, gpu="Tesla V100", capability=capability)

    assert lack((8, 9)) is None
    assert lack((7, 0)).stop
    assert "no kernels for Tesla V100 (sm_70), but for sm_80" in lack((7, 0)).what


def test_a_driver_that_is_older_than_torchs_cuda_is_told():
    def lack(runs, cuda="13.0"):
        return preflight.check_driver(cuda, driver="535.1", runs=runs)

    assert "runs CUDA 12.2 at most, and torch is built for CUDA 13.0" in lack("12.2").what
    assert lack("13.0") is lack(None) is lack("12.2", None) is lack("12.2", "12.8") is None


def test_what_triton_needs_is_named():
    assert preflight.check_triton("3.9", compiler="/usr/bin/gcc", headers=True) is None
    assert "not installed" in preflight.check_triton(None, compiler="gcc", headers=True).what
    said = preflight.check_triton("3.9", compiler=None, headers=False).what
    assert "a C compiler (gcc, or CC=...) and Python's headers" in said
