import os
import stat

import pytest

from unet3d.errors import UsageError
from unet3d.machine.distributed_env import (
    ProcessRank,
    check_rank_variables,
    detect_launcher,
    read_process_rank,
    resolve_rendezvous,
)


def torchrun(rank=3, local=1, world=4, per_node=2):
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(per_node),
    }


JOB_SCRIPT = {  # started by sbatch: SLURM makes it task 0, outside of any step
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


def srun(rank=3, local=1, world=4, tasks="2(x2)"):
    return JOB_SCRIPT | {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }


@pytest.mark.parametrize("launch", ["torchrun", "slurm"])
def test_ranks_are_read_from_the_launchers_environment(launch):
    environ = torchrun() if launch == "torchrun" else srun()
    process = read_process_rank(launch, environ)
    assert process == ProcessRank(rank=3, local_rank=1, world_size=4, local_world_size=2)
    assert process.num_nodes == 2


@pytest.mark.parametrize(("tasks", "world", "nodes"), [("3", 3, 1), ("1(x2)", 2, 2), ("1", 1, 1)])
def test_slurm_tasks_are_grouped_by_node(tasks, world, nodes):
    process = read_process_rank("slurm", srun(rank=0, local=0, world=world, tasks=tasks))
    assert (process.world_size, process.num_nodes) == (world, nodes)


@pytest.mark.parametrize(("tasks", "world"), [("2,1", 3), ("2,1(x2)", 4), ("1,2,1", 4)])
def test_slurm_nodes_with_different_numbers_of_tasks_are_rejected(tasks, world):
    with pytest.raises(UsageError, match="same number of processes"):
        read_process_rank("slurm", srun(rank=0, local=0, world=world, tasks=tasks))


def test_torchrun_nodes_with_different_numbers_of_processes_are_rejected():
    with pytest.raises(UsageError, match="same number of processes"):
        read_process_rank("torchrun", torchrun(world=3, per_node=2))


@pytest.mark.parametrize(
    ("launch", "environ", "launcher"),
    [
        ("local", torchrun(), "torchrun"),
        ("local", srun(), "slurm"),
        ("slurm", torchrun(), "torchrun"),
        ("torchrun", srun(), "slurm"),
    ],
)
def test_processes_that_would_each_train_alone_get_the_trainer_to_use(launch, environ, launcher):
    with pytest.raises(UsageError, match=f"{launcher} started 4 processes.*add trainer={launcher}"):
        read_process_rank(launch, environ)


def test_torchrun_within_a_slurm_job_is_torchrun():
    assert detect_launcher(JOB_SCRIPT | torchrun()) == "torchrun"
    assert detect_launcher(srun() | torchrun()) == "torchrun"


@pytest.mark.parametrize("environ", [{}, JOB_SCRIPT, srun(0, 0, 1, "1"), torchrun(0, 0, 1, 1)])
def test_a_single_process_has_no_launcher(environ):
    assert detect_launcher(environ) is None
    assert read_process_rank("local", environ) == ProcessRank()


@pytest.mark.parametrize("environ", [{}, JOB_SCRIPT])
def test_a_job_script_without_srun_is_rejected(environ):
    with pytest.raises(UsageError, match="started by srun"):
        read_process_rank("slurm", environ)


def test_trainer_torchrun_without_torchrun_is_rejected():
    with pytest.raises(UsageError, match="started by torchrun"):
        read_process_rank("torchrun", {})


def test_the_rendezvous_of_a_job_is_on_its_first_node(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    host, port = resolve_rendezvous("slurm", srun())
    assert host == "n1"
    assert 20000 <= port < 32000
    assert (host, port) != resolve_rendezvous("slurm", srun() | {"SLURM_STEP_ID": "1"})


def test_torchruns_own_store_with_its_dead_addresses_is_not_used():
    environ = {"MASTER_ADDR": "n1", "MASTER_PORT": "43210"}
    assert resolve_rendezvous("local", environ) == ("n1", 43210)
    host, port = resolve_rendezvous("torchrun", environ)
    assert host == "n1"
    assert 20000 <= port < 32000


def test_a_process_that_sees_one_gpu_uses_it_whatever_its_rank():
    process = ProcessRank(rank=5, local_rank=1, world_size=8, local_world_size=4)
    assert (process.assign_gpu(4).gpu_index, process.assign_gpu(4).num_nodes) == (1, 2)
    alone = process.assign_gpu(1)
    assert (alone.gpu_index, alone.visible_devices, alone.num_nodes) == (0, 1, 8)
    with pytest.raises(UsageError, match="4 processes on this machine, but rank 5 sees 2 GPUs"):
        process.assign_gpu(2)


def test_a_variable_of_a_launcher_that_is_no_number_is_named():
    with pytest.raises(UsageError, match="variable RANK must be a number, got 'x': unset it"):
        check_rank_variables({"RANK": "x"})
    check_rank_variables(torchrun() | {"SLURM_PROCID": "0"})
