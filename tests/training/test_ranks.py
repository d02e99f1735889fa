"""The ranks of processes that a launcher has started."""

import pytest

from unet3d.errors import UsageError
from unet3d.training.ranks import (
    SLURM_NAMES,
    TORCHRUN_NAMES,
    ProcessRank,
    detect_launcher,
    read_process_rank,
)


def launched(names, ranks, **others):
    return dict(zip(names, ranks.split(), strict=True)) | others


JOB_SCRIPT = launched(SLURM_NAMES, "0 0 4 2")  # sbatch's: task 0, outside of any step
SRUN = launched(SLURM_NAMES, "3 1 4 2", SLURM_STEP_NUM_TASKS="4")
TORCHRUN = launched(TORCHRUN_NAMES, "3 1 4 2", TORCHELASTIC_RUN_ID="none")
SINGLE = (
    launched(SLURM_NAMES, "0 0 1 2", SLURM_STEP_NUM_TASKS="1"),
    launched(TORCHRUN_NAMES, "0 0 1 1", TORCHELASTIC_RUN_ID="none"),
)


@pytest.mark.parametrize(("launch", "environ"), [("torchrun", TORCHRUN), ("slurm", SRUN)])
def test_ranks_are_read_from_the_launchers_environment(launch, environ):
    process = read_process_rank(launch, environ)
    assert process == ProcessRank(rank=3, local_rank=1, world_size=4, local_world_size=2)


@pytest.mark.parametrize(
    ("launch", "environ", "launcher"), [("local", SRUN, "slurm"), ("slurm", TORCHRUN, "torchrun")]
)
def test_processes_that_would_each_train_alone_get_the_trainer_to_use(launch, environ, launcher):
    with pytest.raises(UsageError, match=f"{launcher} started 4 processes.*add trainer={launcher}"):
        read_process_rank(launch, environ)


def test_torchrun_within_a_slurm_job_is_torchrun():
    assert detect_launcher(SRUN | TORCHRUN) == "torchrun"


@pytest.mark.parametrize("environ", [{}, JOB_SCRIPT, *SINGLE])
def test_a_single_process_has_no_launcher(environ):
    assert detect_launcher(environ) is None
    assert read_process_rank("local", environ) == ProcessRank()


@pytest.mark.parametrize(("launch", "program"), [("slurm", "srun"), ("torchrun", "torchrun")])
def test_a_job_script_without_its_launcher_is_rejected(launch, program):
    with pytest.raises(UsageError, match=f"started by {program}"):
        read_process_rank(launch, JOB_SCRIPT)
