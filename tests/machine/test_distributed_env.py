import pytest

from unet3d.errors import UsageError
from unet3d.machine.distributed_env import ProcessRank, detect_launcher, read_process_rank


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
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
}


def srun(rank=3, local=1, world=4):
    return JOB_SCRIPT | {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NTASKS": str(world),
        "SLURM_STEP_NUM_TASKS": str(world),
    }


@pytest.mark.parametrize(("launch", "environ"), [("torchrun", torchrun()), ("slurm", srun())])
def test_ranks_are_read_from_the_launchers_environment(launch, environ):
    process = read_process_rank(launch, environ)
    assert process == ProcessRank(rank=3, local_rank=1, world_size=4, local_world_size=2)


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


@pytest.mark.parametrize("environ", [{}, JOB_SCRIPT, srun(0, 0, 1), torchrun(0, 0, 1, 1)])
def test_a_single_process_has_no_launcher(environ):
    assert detect_launcher(environ) is None
    assert read_process_rank("local", environ) == ProcessRank()


@pytest.mark.parametrize(("launch", "program"), [("slurm", "srun"), ("torchrun", "torchrun")])
def test_a_job_script_without_its_launcher_is_rejected(launch, program):
    with pytest.raises(UsageError, match=f"started by {program}"):
        read_process_rank(launch, JOB_SCRIPT)
