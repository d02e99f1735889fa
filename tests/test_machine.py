"""Devices, precisions, memory and ranks of this machine."""

import pytest
import torch

from unet3d import machine
from unet3d.errors import UsageError
from unet3d.machine import (
    CUDA_CONTEXT_BYTES,
    ProcessRank,
    detect_launcher,
    get_available_bytes,
    get_free_bytes,
    read_cgroups,
    read_meminfo,
    read_process_rank,
)
from unet3d.text import GIB


def test_a_cpu_computes_half_precision_in_bf16_or_says_why_not(monkeypatch):
    monkeypatch.setattr(machine, "has_fast_bf16", lambda: True)
    assert machine.resolve_precision(16, "cpu").lightning == "bf16-mixed"
    assert machine.resolve_precision("bf16", "cpu") == machine.Precision("bf16", "bf16")
    monkeypatch.setattr(machine, "has_fast_bf16", lambda: False)
    resolved = machine.resolve_precision("bf16", "cpu")
    assert resolved.used == "32"
    assert "no fast" in resolved.reason


def test_a_torch_without_onednn_has_no_fast_bf16(monkeypatch):
    """On Apple's CPUs there is no operator to ask."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    assert not machine.has_fast_bf16()


@pytest.mark.parametrize(("name", "message"), [("16-true", "needs a GPU"), (64, "32, 16, bf16")])
def test_a_precision_that_no_cpu_has_is_rejected(name, message):
    with pytest.raises(UsageError, match=message):
        machine.resolve_precision(name, "cpu")


def test_a_missing_gpu_is_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.resolve_device("auto") == "cpu"
    with pytest.raises(UsageError, match="finds no CUDA device"):
        machine.resolve_device("cuda")
    with pytest.raises(
        UsageError, match="device must be auto, cpu, cuda, cuda:N or mps, got 'gpu'"
    ):
        machine.resolve_device("gpu", "device")


def test_a_gpu_is_chosen_by_its_number(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert machine.resolve_device("cuda:1") == "cuda"
    for requested in ("cuda:1", "cuda", "cpu", "auto"):
        machine.select_gpu(requested)
    assert chosen == [1]
    with pytest.raises(UsageError, match="cuda:2: torch finds 2 GPUs, and counts them from 0"):
        machine.select_gpu("cuda:2")


def test_an_apple_gpu_runs_plain_modules_in_float32(monkeypatch):
    with pytest.raises(UsageError, match=r"trainer\.accelerator=mps needs a Mac with an Apple GPU"):
        machine.resolve_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert machine.resolve_device("mps") == "mps"
    assert machine.resolve_precision("16", "mps").used == "32"
    assert "without fused blocks" in machine.describe_missing_kernels("mps")


def test_rocm_says_what_runs_slowly(monkeypatch):
    assert machine.describe_missing_kernels("cuda") is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert machine.describe_missing_kernels("cuda").startswith("ROCm: poolings and fused blocks")


@pytest.mark.parametrize(
    ("free", "expected"), [(10, 12 * GIB + CUDA_CONTEXT_BYTES), (24, 24 * GIB)]
)
def test_a_gpu_offers_what_is_free_and_what_this_process_holds(monkeypatch, free, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    assert get_available_bytes(torch.device("cuda", 0)) == expected


def test_memory_in_torchs_cache_is_free_for_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    assert get_free_bytes(torch.device("cuda", 0)) == 12 * GIB


@pytest.fixture
def group(tmp_path):
    """Return a function that writes the files of a control group below a mount."""
    mount = tmp_path / "cgroup"

    def write(path, **files):
        (mount / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (mount / path / name.replace("__", ".")).write_text(text + "\n")
        return mount

    return write


def write_own(tmp_path, text):
    file = tmp_path / "own"
    file.write_text(text)
    return file


def test_a_containers_limit_applies_and_cached_files_count_as_free(group, tmp_path):
    mount = group(".", memory__max="1000", memory__current="700")
    group(".", memory__stat="anon 500\ninactive_file 150")
    own = write_own(tmp_path, "0::/\n")
    assert read_cgroups(mount, own) == [(1000, 550)]
    group(".", memory__max="max")
    assert read_cgroups(mount, own) == []


def test_the_limits_of_all_groups_around_a_job_apply(group, tmp_path):
    stat = {"memory__stat": "inactive_file 0"}
    mount = group("slurm/job_17", memory__max="1000", memory__current="10", **stat)
    group("slurm/job_17/step_0", memory__max="max", memory__current="10", **stat)
    group("slurm", memory__max="3000", memory__current="2900", **stat)
    group("slurm/job_18", memory__max="1", memory__current="0", **stat)
    own = write_own(tmp_path, "0::/slurm/job_17/step_0\n")
    assert read_cgroups(mount, own) == [(1000, 10), (3000, 2900)]


def test_version_1_has_a_mount_per_controller(group, tmp_path):
    stat = {"memory__stat": "total_inactive_file 50"}
    mount = group("memory/docker/a", memory__usage_in_bytes="300", **stat)
    group("memory/docker/a", memory__limit_in_bytes="1000")
    group("memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="9", **stat)
    own = write_own(tmp_path, "4:memory:/docker/a\n1:cpu,cpuacct:/docker/a\n0::/\n")
    assert read_cgroups(mount, own) == [(1000, 250)]


def launched(names, ranks, **others):
    return dict(zip(names, ranks.split(), strict=True)) | others


JOB_SCRIPT = launched(machine.SLURM_NAMES, "0 0 4 2")  # sbatch's: task 0, outside of any step
SRUN = launched(machine.SLURM_NAMES, "3 1 4 2", SLURM_STEP_NUM_TASKS="4")
TORCHRUN = launched(machine.TORCHRUN_NAMES, "3 1 4 2", TORCHELASTIC_RUN_ID="none")
SINGLE = (
    launched(machine.SLURM_NAMES, "0 0 1 2", SLURM_STEP_NUM_TASKS="1"),
    launched(machine.TORCHRUN_NAMES, "0 0 1 1", TORCHELASTIC_RUN_ID="none"),
)


@pytest.mark.parametrize(("launch", "environ"), [("torchrun", TORCHRUN), ("slurm", SRUN)])
def test_ranks_are_read_from_the_launchers_environment(launch, environ):
    process = read_process_rank(launch, environ)
    assert process == ProcessRank(rank=3, local_rank=1, world_size=4, local_world_size=2)


@pytest.mark.parametrize(
    ("launch", "environ", "launcher"),
    [
        ("local", TORCHRUN, "torchrun"),
        ("local", SRUN, "slurm"),
        ("slurm", TORCHRUN, "torchrun"),
        ("torchrun", SRUN, "slurm"),
    ],
)
def test_processes_that_would_each_train_alone_get_the_trainer_to_use(launch, environ, launcher):
    with pytest.raises(UsageError, match=f"{launcher} started 4 processes.*add trainer={launcher}"):
        read_process_rank(launch, environ)


def test_torchrun_within_a_slurm_job_is_torchrun():
    assert detect_launcher(JOB_SCRIPT | TORCHRUN) == "torchrun"
    assert detect_launcher(SRUN | TORCHRUN) == "torchrun"


@pytest.mark.parametrize("environ", [{}, JOB_SCRIPT, *SINGLE])
def test_a_single_process_has_no_launcher(environ):
    assert detect_launcher(environ) is None
    assert read_process_rank("local", environ) == ProcessRank()


@pytest.mark.parametrize(("launch", "program"), [("slurm", "srun"), ("torchrun", "torchrun")])
def test_a_job_script_without_its_launcher_is_rejected(launch, program):
    with pytest.raises(UsageError, match=f"started by {program}"):
        read_process_rank(launch, JOB_SCRIPT)


def test_other_systems_have_a_name_without_proc(monkeypatch, tmp_path):
    assert read_meminfo(tmp_path / "none") == {}
    assert read_cgroups(tmp_path, tmp_path / "none") == []
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(machine.platform, "freedesktop_os_release", lambda: {}["PRETTY_NAME"])
    monkeypatch.setattr(machine.platform, "processor", str)
    assert machine.get_cpu_model() is None
    assert machine.get_os_name()
