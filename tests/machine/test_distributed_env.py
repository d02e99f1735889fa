import os
import stat

import pytest

from unet3d.errors import UsageError
from unet3d.machine.distributed_env import Ranks, detect_launcher, read_ranks, resolve_rendezvous


def torchrun(rank=3, local=1, world=4, per_node=2):
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(per_node),
    }


JOB_SCRIPT = {  # as sbatch starts it: SLURM counts it as task 0, of no step
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
def test_a_rank_is_what_its_launcher_says(launch):
    environ = torchrun() if launch == "torchrun" else srun()
    ranks = read_ranks(launch, environ)
    assert ranks == Ranks(rank=3, local=1, world=4, per_node=2)
    assert ranks.nodes == 2


@pytest.mark.parametrize(("tasks", "world", "nodes"), [("3", 3, 1), ("1(x2)", 2, 2), ("1", 1, 1)])
def test_slurm_counts_tasks_by_runs_of_equal_nodes(tasks, world, nodes):
    ranks = read_ranks("slurm", srun(rank=0, local=0, world=world, tasks=tasks))
    assert (ranks.world, ranks.nodes) == (world, nodes)


@pytest.mark.parametrize(("tasks", "world"), [("2,1", 3), ("2,1(x2)", 4), ("1,2,1", 4)])
def test_machines_with_unlike_numbers_of_tasks_are_refused(tasks, world):
    with pytest.raises(UsageError, match="as many processes as the others"):
        read_ranks("slurm", srun(rank=0, local=0, world=world, tasks=tasks))


def test_torchrun_with_unlike_machines_is_refused():
    with pytest.raises(UsageError, match="as many processes as the others"):
        read_ranks("torchrun", torchrun(world=3, per_node=2))


@pytest.mark.parametrize(
    ("launch", "environ", "starter"),
    [
        ("here", torchrun(), "torchrun"),
        ("here", srun(), "slurm"),
        ("slurm", torchrun(), "torchrun"),
        ("torchrun", srun(), "slurm"),
    ],
)
def test_processes_that_would_each_train_alone_are_told_their_trainer(launch, environ, starter):
    with pytest.raises(UsageError, match=f"{starter} started 4 processes.*add trainer={starter}"):
        read_ranks(launch, environ)


def test_torchrun_within_a_slurm_job_is_torchrun():
    assert detect_launcher(JOB_SCRIPT | torchrun()) == "torchrun"
    assert detect_launcher(srun() | torchrun()) == "torchrun"


@pytest.mark.parametrize("environ", [{}, JOB_SCRIPT, srun(0, 0, 1, "1"), torchrun(0, 0, 1, 1)])
def test_one_process_is_nobodys_rank(environ):
    assert detect_launcher(environ) is None
    assert read_ranks("here", environ) == Ranks()


@pytest.mark.parametrize("environ", [{}, JOB_SCRIPT])
def test_a_job_script_that_forgot_srun_is_told_so(environ):
    with pytest.raises(UsageError, match="that srun starts"):
        read_ranks("slurm", environ)


def test_torchruns_trainer_without_torchrun_is_refused():
    with pytest.raises(UsageError, match="that torchrun starts"):
        read_ranks("torchrun", {})


def test_the_ranks_of_a_job_meet_at_its_first_machine(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    host, port = resolve_rendezvous("slurm", srun())
    assert host == "n1"
    assert 20000 <= port < 32000
    assert (host, port) != resolve_rendezvous("slurm", srun() | {"SLURM_STEP_ID": "1"})


def test_ranks_do_not_meet_where_torchrun_keeps_what_dead_ones_said():
    there = {"MASTER_ADDR": "n1", "MASTER_PORT": "43210"}
    assert resolve_rendezvous("here", there) == ("n1", 43210)
    host, port = resolve_rendezvous("torchrun", there)
    assert host == "n1"
    assert 20000 <= port < 32000
