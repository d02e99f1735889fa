"""The ranks of a run: who they are, how they start, and how they end together."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unet3d.errors import RunError, UsageError
from unet3d.signals import SignalListener
from unet3d.training import launch
from unet3d.training.launch import (
    SLURM_NAMES,
    TORCHRUN_NAMES,
    ProcessRank,
    detect_launcher,
    launch_ranks,
    read_process_rank,
    start_ranks,
    wait_for_ranks,
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


@pytest.mark.parametrize(
    ("scripts", "first"),
    [
        (("sleep 0.5; exit 143", "exit 4"), (1, 4)),
        (("exit 4", "exit 143"), (1, 143)),
        (("exec sleep 30", "kill -TERM $$"), (1, -15)),
    ],
    ids=str,
)
def test_the_first_rank_that_fails_ends_all_and_says_why(scripts, first, monkeypatch):
    monkeypatch.setattr(launch, "SETTLE_SECONDS", 0.5)
    begun = time.monotonic()
    processes = [subprocess.Popen(["sh", "-c", script]) for script in scripts]
    if first == (1, 143):
        time.sleep(0.3)  # both have ended
    assert wait_for_ranks(processes, SignalListener()) == first
    assert time.monotonic() - begun < 15
    assert all(process.poll() is not None for process in processes)


def test_ranks_import_nothing_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    (process,) = start_ranks(["--help"], tmp_path, 1)
    assert process.wait() == 0


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path, monkeypatch):
    scripts = ("exec sleep 30", "kill -KILL $$")
    monkeypatch.setattr(launch, "SETTLE_SECONDS", 0.5)
    monkeypatch.setattr(
        launch,
        "start_ranks",
        lambda *_: [subprocess.Popen(["sh", "-c", script]) for script in scripts],
    )
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL; rerun with resume=auto"):
        launch_ranks([], tmp_path, 2)


@pytest.mark.long
def test_ranks_of_torchrun_share_one_folder(small, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "unet3d"]
    command += ["train", *small, "trainer=torchrun", f"hydra.run.dir={tmp_path / 'run'}"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks" in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


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
