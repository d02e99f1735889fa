"""The folder of a run has one writer."""

import os
import subprocess
import sys

import pytest

from unet3d.errors import UsageError
from unet3d.training.run_folder import LOCK, lock_folder


def test_a_folder_in_use_is_refused_in_one_line_that_says_how_to_clear_it(tmp_path):
    expected = rf"in use by process {os.getpid()} on .*, since 20.*delete {tmp_path / LOCK}\)$"
    with lock_folder(tmp_path), pytest.raises(UsageError, match=expected), lock_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    with lock_folder(tmp_path):
        pass


def test_a_killed_process_holds_nothing_even_if_it_has_forked(tmp_path):
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from unet3d.training.run_folder import lock_folder\n"
        "with lock_folder(Path(sys.argv[1])):\n"
        "    if not os.fork():  # a data worker outlives its parent for seconds\n"
        "        print('held', flush=True)\n"
        "    time.sleep(30)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"held\n"
        try:
            with pytest.raises(UsageError, match=f"process {process.pid} "), lock_folder(tmp_path):
                pass
            process.kill()
            process.wait()
            with lock_folder(tmp_path):
                pass
        finally:
            os.killpg(process.pid, 9)
