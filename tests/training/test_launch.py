"""`unet3d train` with several ranks: how they start, and how they end together."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unet3d.errors import SignalListener
from unet3d.training import distributed
from unet3d.training.distributed import start_ranks, wait_for_ranks


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
    monkeypatch.setattr(distributed, "SETTLE_SECONDS", 0.5)
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


def start(*command, folder):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", *command, f"hydra.run.dir={folder}"]
    return subprocess.Popen(command, cwd=folder.parent, env=env, stdout=-1, stderr=-1, text=True)


def list_children(pid):
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_rank_ends_the_run(small, tmp_path):
    options = [*small, "trainer.devices=2", "trainer.max_steps=5000", "save_every_seconds=0"]
    launcher = start("unet3d", "train", *options, folder=tmp_path / "run")
    while not list(tmp_path.glob("run/checkpoints/last.ckpt")):
        assert launcher.poll() is None
        time.sleep(0.05)
    os.kill(list_children(launcher.pid)[1], signal.SIGKILL)
    _, err = launcher.communicate()
    assert launcher.returncode == 4
    assert "rank 1 was killed by SIGKILL; rerun with resume=auto" in err


@pytest.mark.slow
def test_ranks_of_torchrun_share_one_folder(small, tmp_path):
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "-m", "unet3d", "train"]
    launcher = start(*torchrun, *small, "trainer=torchrun", folder=tmp_path / "run")
    out, err = launcher.communicate()
    assert launcher.returncode == 0, err
    assert "2 ranks" in out
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
