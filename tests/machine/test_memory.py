import pytest
import torch

from unet3d.machine.memory import (
    get_available_bytes,
    get_free_bytes,
    read_cgroups,
    read_meminfo,
)
from unet3d.units import CUDA_CONTEXT_BYTES, GIB


def test_a_cpus_available_memory_is_plausible():
    available = get_available_bytes(torch.device("cpu"))
    assert available is None or 2**20 < available < 2**50


def test_without_proc_meminfo_nothing_is_known(tmp_path):
    assert read_meminfo(tmp_path / "none") == {}
    assert read_cgroups(tmp_path, tmp_path / "none") == []


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
