import os

from unet3d.machine import cgroups, memory, system
from unet3d.units import GIB


def test_a_system_tells_what_a_process_may_have():
    found = system.inspect_system()
    assert 1 <= found.cores <= found.cores_there == os.cpu_count()
    assert found.threads == 1  # as the tests ask
    assert 0 < found.ram_free <= found.ram
    assert found.shared.free <= found.shared.total
    assert found.open_files <= found.open_files_most


def test_where_there_is_no_proc_what_it_tells_is_not_known(tmp_path, monkeypatch):
    nowhere = tmp_path / "none"
    for module, place in ((memory, "MEMINFO"), (system, "CPUINFO"), (system, "SHM")):
        monkeypatch.setattr(module, place, nowhere)
    monkeypatch.setattr(memory.meminfo, "__defaults__", (nowhere,))
    monkeypatch.setattr(cgroups.get_available_memory, "__defaults__", (nowhere, nowhere))
    monkeypatch.setattr(system.platform, "freedesktop_os_release", lambda: {}["PRETTY_NAME"])
    monkeypatch.setattr(system.platform, "processor", str)
    monkeypatch.delattr(os, "sched_getaffinity")
    found = system.inspect_system()
    assert found.shared is found.ram is found.ram_free is found.swap is None
    assert system.get_cpu_model(nowhere) is None
    assert found.cores == os.cpu_count()
    assert found.name


def test_who_started_a_process_is_told():
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "WORLD_SIZE": "4"}
    srun = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert system.launcher({}) is None
    assert system.launcher(torchrun) == "torchrun, rank 2 of 4"
    assert system.launcher(srun) == "SLURM job 17, task 1 of 2"
    assert system.launcher({"SLURM_JOB_ID": "17"}) == "SLURM job 17, not a task of srun"


def test_the_room_of_a_folder_that_is_not_there_yet_is_that_of_the_one_above(tmp_path):
    found = system.get_disk_space(tmp_path / "runs" / "first")
    assert found.folder == str(tmp_path / "runs" / "first")
    assert 0 < found.free <= found.total < 2**20 * GIB
