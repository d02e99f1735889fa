import json
from types import SimpleNamespace

import pytest
import torch

from unet3d.__main__ import main
from unet3d.commands.doctor import (
    describe_machine,
    describe_missing_triton,
    format_doctor_report,
    inspect_machine,
    inspect_run,
)
from unet3d.text import GIB
from unet3d.training import machine_checks

SMALL = ["model.depth=2", "model.width=4", "model.convs_per_level=1"]
"""A network whose step is estimated quickly."""


@pytest.fixture
def gpu(monkeypatch):
    """Torch as on a machine with one GPU."""
    properties = SimpleNamespace(name="NVIDIA Fake", major=9, minor=0)
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: properties,
        "is_bf16_supported": lambda **options: True,
        "mem_get_info": lambda device: (60 * GIB, 80 * GIB),
        "memory_reserved": lambda device: 0,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    # A torch that is built for CUDA would otherwise ask a driver for its current stream.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def inspect(composed, tmp_path):
    """Inspect this machine for a run: return the machine, the run and its problems."""

    def inspect_with(*overrides):
        settings = composed(*overrides, base=[])
        machine = inspect_machine(settings, tmp_path)
        return machine, *inspect_run(settings, tmp_path, machine)

    return inspect_with


def test_the_largest_batch_leaves_out_what_others_hold_of_a_gpu(inspect, gpu):
    machine, run, problems = inspect(*SMALL, "precision=16")
    assert (run.device, run.precision.used) == ("cuda", "16")
    assert 60 * GIB <= run.available < 61 * GIB
    assert run.largest_batch > 100 * run.batch_size
    assert not [problem for problem in problems if problem.is_fatal]
    text = format_doctor_report(machine, problems)
    assert "name NVIDIA Fake, total 80.0 GiB, free 60.0 GiB, " in text
    assert describe_machine(torch.device("cuda"))["gpu"] == "NVIDIA Fake"


def test_a_cpu_its_precision_and_a_missing_compiler_are_reported(inspect, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    _, run, problems = inspect(*SMALL, "precision=16")
    text = "\n".join(problem.message for problem in problems)
    for start in ("no GPU found: training runs on", "precision=16 runs as", "no C++ compiler"):
        assert f"\n{start}" in f"\n{text}"
    assert run.largest_batch is None
    assert 0 < run.peak < GIB


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision=16-true", "trainer.accelerator=cpu"], "needs a GPU"),
        ([*SMALL, "trainer=torchrun"], "torchrun"),
    ],
)
def test_what_would_stop_the_run_comes_first_and_the_rest_is_still_reported(
    inspect, overrides, message
):
    _, run, problems = inspect(*overrides)
    assert problems[0].is_fatal
    assert message in problems[0].message
    assert f"BLOCKER: {problems[0].message}" in format_doctor_report({}, problems)
    assert any("CPU cores" in problem.message for problem in problems) or run.precision is None


def test_a_small_dev_shm_ends_the_doctor_with_code_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    disk = SimpleNamespace(total=8192, free=4096)
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: disk)
    assert main(["doctor", *SMALL, "data.num_workers=2", "format=json"]) == 1
    problem = json.loads(capsys.readouterr().out)["problems"][0]
    assert problem["is_fatal"]
    assert "batches of 2 workers need" in problem["message"]
    assert "--shm-size=1g or use data.num_workers=0" in problem["message"]
    assert not list(tmp_path.iterdir())  # neither data nor a run is created


def test_missing_requirements_of_triton_are_reported():
    software = {"packages": {"triton": "3.9"}, "triton_compiler": None, "python_headers": False}
    message = describe_missing_triton(software)
    assert "a C compiler (gcc, or CC=...) and Python's headers" in message
    complete = software | {"triton_compiler": "/usr/bin/gcc", "python_headers": True}
    assert describe_missing_triton(complete) is None
    assert "not installed" in describe_missing_triton(complete | {"packages": {"triton": None}})
