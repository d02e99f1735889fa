"""A command whose terminal is gone, closed or full does its work all the same."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = f'"{sys.executable}" -W ignore -m unet3d.cli.main'


def run_shell(line, folder):
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "streams", [">&- 2>&- <&-", ">/dev/full 2>/dev/full", "2>&1 </dev/null | head -1"]
)
def test_a_run_without_a_terminal_trains_to_its_end(small, tmp_path, streams):
    words = " ".join(f"'{word}'" for word in [*small, "logger=csv", "hydra.run.dir=run"])
    ended = run_shell(f"{COMMAND} train {words} {streams}", tmp_path)
    assert ended.returncode == 0
    assert "Traceback" not in ended.stdout + ended.stderr
    assert (tmp_path / "run" / "report.html").exists()
    assert not (tmp_path / "run" / "run.lock").exists()


def test_other_commands_end_quietly_too(tmp_path):
    ended = run_shell(f"{COMMAND} --help | head -1; {COMMAND} --help >&-", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_hangup_does_not_end_a_training(tmp_path):
    code = (
        "import os, signal, sys; from unet3d.cli.streams import ignore_hangup; ignore_hangup();"
        "os.kill(os.getpid(), signal.SIGHUP); print('alive')"
    )
    ended = run_shell(f'"{sys.executable}" -c "{code}"', tmp_path)
    assert ended.stdout == "alive\n"
    assert signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
