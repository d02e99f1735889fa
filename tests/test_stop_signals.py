import os
import signal
import subprocess
import sys
import time

import pytest

from unet3d.cli.main import prepare_signals
from unet3d.errors import Interrupted
from unet3d.stop_signals import SignalListener


def send(number):
    os.kill(os.getpid(), number)


def test_a_signal_waits_until_a_module_that_swallows_exceptions_is_imported(tmp_path, monkeypatch):
    (tmp_path / "swallows.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.1)\n"
        "except BaseException:\n"
        "    pass\n"
        "done = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with SignalListener().listening():
        import swallows  # ty: ignore[unresolved-import]

        with pytest.raises(Interrupted, match="SIGTERM"):
            time.sleep(5)
    assert swallows.done


def test_a_second_sigterm_does_not_disturb_what_cleans_up_after_the_first():
    cleaned = False
    with SignalListener().listening():
        try:
            send(signal.SIGTERM)
        except Interrupted:
            send(signal.SIGTERM)
            cleaned = True
    assert cleaned


def test_a_second_ctrl_c_ends_what_cleans_up_after_the_first():
    with SignalListener().listening():
        with pytest.raises(Interrupted):
            send(signal.SIGINT)
        with pytest.raises(Interrupted):
            send(signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 143), ("SIGHUP", 143)]
)
def test_a_command_that_is_still_imported_ends_at_once_with_one_line(number, code):
    program = (
        "import os, signal, sys\n"
        "from unet3d.cli import main\n"
        f"main.import_command = lambda command: os.kill(os.getpid(), signal.{number})\n"
        "sys.argv = ['unet3d', 'doctor']\n"
        "sys.exit(main.main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (code, f"unet3d: interrupted by {number}\n")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_while_the_interpreter_exits_does_not_replace_the_exit_code(number):
    program = (
        "import os, signal, sys, unet3d.cli.main\n"
        "class Kept:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid()):\n"
        f"        kill(pid, signal.{number})\n"
        "kept = Kept()\n"
        "kept.itself = kept  # deleted by the last collection of garbage\n"
        "sys.argv = ['unet3d', 'doctro']\n"
        "sys.exit(unet3d.cli.main.main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_a_finished_command_that_waits_for_a_thread(number, code):
    program = (
        "import os, signal, sys, threading, time, unet3d.cli.main\n"
        "def wait():\n"
        "    threading.main_thread().join()\n"
        "    for _ in range(60):  # one may come before the main thread waits\n"
        "        time.sleep(0.5)\n"
        f"        os.kill(os.getpid(), signal.{number})\n"
        "threading.Thread(target=wait).start()\n"
        "sys.argv = ['unet3d', '--version']\n"
        "sys.exit(unet3d.cli.main.main())\n"
    )
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert ended.returncode == code
    assert time.monotonic() - start < 20


def test_two_ctrl_c_end_what_cleans_up_after_a_sigterm():
    with SignalListener().listening():
        with pytest.raises(Interrupted):
            send(signal.SIGTERM)
        send(signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGINT"):
            send(signal.SIGINT)


def test_a_program_that_runs_while_it_is_imported_is_interrupted(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(
        "import os, signal, time\n"
        "from unet3d.stop_signals import SignalListener\n"
        "with SignalListener().listening():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Interrupted):
        import program  # noqa: F401  # ty: ignore[unresolved-import]


def test_signals_that_a_command_was_started_to_ignore_do_not_stop_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with SignalListener().listening():
            send(signal.SIGINT)
        assert signal.SIGINT not in prepare_signals(["doctor"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.SIGINT in prepare_signals(["doctor"])
