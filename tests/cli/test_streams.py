"""A command whose terminal is gone, closed or full does its work all the same."""

import os
import shlex
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unet3d.cli.streams import CURSOR_MOVES, SafeStream, make_plain

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
    before = signal.getsignal(signal.SIGHUP)  # nohup ignores it
    code = (
        "import os, signal, sys; from unet3d.cli.streams import ignore_hangup; ignore_hangup();"
        "os.kill(os.getpid(), signal.SIGHUP); print('alive')"
    )
    ended = run_shell(f'"{sys.executable}" -c "{code}"', tmp_path)
    assert ended.stdout == "alive\n"
    assert signal.getsignal(signal.SIGHUP) == before


@given(st.text(st.sampled_from("ab\n\t\r\x1b[]A0;m\x07\x9b\u202e\ud800é"), max_size=20))
def test_a_terminal_gets_no_control_characters_but_lines_and_moves_of_progress_bars(text):
    shown = make_plain(text)
    if not CURSOR_MOVES.fullmatch(text):
        assert all(c.isprintable() or c in "\n\t" for c in shown.removeprefix("\r"))


@pytest.mark.parametrize("language", ["C.UTF-8", "C"])
def test_names_of_files_reach_a_terminal_as_text(tmp_path, language):
    name = shlex.quote("caf\u00e9\x1b]0;owned\x07\udcff.ckpt")
    line = f"LC_ALL={language} {COMMAND} predict checkpoint={name} input=. output=out"
    ended = run_shell(line, tmp_path)
    assert ended.returncode == 2
    assert r"\x1b]0;owned\x07\udcff.ckpt" in ended.stderr


def test_lines_that_are_written_at_once_are_plain_too():
    stream = StringIO()
    SafeStream(stream).writelines(["a\n", "\x1b]0;title\x07"])
    assert stream.getvalue() == "a\n\\x1b]0;title\\x07"


def test_characters_that_a_log_cannot_encode_lose_no_line(tmp_path):
    code = "from unet3d.cli.streams import protect_streams as p; p(); print('\\xe9'); print('b')"
    ended = run_shell(f'PYTHONIOENCODING=ascii "{sys.executable}" -c "{code}"', tmp_path)
    assert ended.stdout == "\\xe9\nb\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_lost_output_is_a_failure_of_a_command_that_prints_its_result(tmp_path):
    ended = run_shell(f"{COMMAND} --help >/dev/full", tmp_path)
    assert ended.returncode == 4
    assert "standard output: No space left on device: the command is done" in ended.stderr
