import os

from unet3d.machine import cgroups, memory, system
from unet3d.units import GIB


def test_a_systems_resources_are_plausible():
    resources = system.inspect_system()
    assert 1 <= resources.cores <= resources.total_cores == os.cpu_count()
    assert resources.threads == 1  # set for tests
    assert 0 < resources.ram_free <= resources.ram
    assert resources.shm.free <= resources.shm.total
    assert resources.open_files <= resources.max_open_files


def test_without_proc_its_values_are_unknown(tmp_path, monkeypatch):
    nowhere = tmp_path / "none"
    for module, constant in ((memory, "MEMINFO"), (system, "CPUINFO"), (system, "SHM")):
        monkeypatch.setattr(module, constant, nowhere)
    monkeypatch.setattr(memory.read_meminfo, "__defaults__", (nowhere,))
    monkeypatch.setattr(cgroups.get_available_memory, "__defaults__", (nowhere, nowhere))
    monkeypatch.setattr(system.platform, "freedesktop_os_release", lambda: {}["PRETTY_NAME"])
    monkeypatch.setattr(system.platform, "processor", str)
    monkeypatch.delattr(os, "sched_getaffinity")
    resources = system.inspect_system()
    assert resources.shm is resources.ram is resources.ram_free is resources.swap is None
    assert system.get_cpu_model(nowhere) is None
    assert resources.cores == os.cpu_count()
    assert resources.name


def test_the_launcher_of_a_process_is_described():
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "WORLD_SIZE": "4"}
    srun = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert system.describe_launcher({}) is None
    assert system.describe_launcher(torchrun) == "torchrun, rank 2 of 4"
    assert system.describe_launcher(srun) == "SLURM job 17, task 1 of 2"
    assert system.describe_launcher({"SLURM_JOB_ID": "17"}) == "SLURM job 17, not started by srun"


def test_the_disk_space_of_a_missing_folder_is_that_of_its_parent(tmp_path):
    space = system.get_disk_space(tmp_path / "runs" / "first")
    assert space.folder == str(tmp_path / "runs" / "first")
    assert 0 < space.free <= space.total < 2**20 * GIB


def test_compiled_kernels_are_counted_and_a_missing_folder_has_none(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernel.cubin").write_bytes(b"1234")
    (tmp_path / "a" / "kernel.json").write_bytes(b"12")
    cache = system.inspect_kernel_cache(tmp_path, "*/*.cubin")
    assert (cache.files, cache.size) == (1, 4)
    assert system.inspect_kernel_cache(tmp_path / "none", "*").files == 0
