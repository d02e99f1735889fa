"""Signals raise Interrupted once, at a good moment if a callback asks for it."""

import os
import signal
import subprocess
import sys

import pytest

from unet3d.errors import Interrupted
from unet3d.signals import SignalListener


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_alone_ends_what_cleans_up_after_the_first_signal(first):
    with SignalListener().listening():
        with pytest.raises(Interrupted):
            send(first)
        if first != signal.SIGINT:
            send(first)
            send(signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGINT"):
            send(signal.SIGINT)


def test_a_run_that_ends_at_a_good_moment_is_not_interrupted_before_a_second_ctrl_c():
    with SignalListener().listening() as signals:
        signals.defers_exit = True
        send(signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(Interrupted):
            send(signal.SIGINT)


def test_a_command_that_is_still_imported_ends_with_one_line():
    program = (
        "import os, signal, sys\n"
        "from unet3d import __main__, app\n"
        "app.import_command = lambda command: os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.argv = ['unet3d', 'doctor']\n"
        "sys.exit(__main__.main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (143, "unet3d: interrupted by SIGUSR1\n")


def test_signals_that_a_command_was_started_to_ignore_do_not_stop_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with SignalListener().listening():
            send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
