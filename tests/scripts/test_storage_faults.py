"""A sample of the faults of scripts.robustness.storage_faults."""

import subprocess
import sys
from pathlib import Path

import pytest

from unet3d.cpp_kernels import find_compiler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux" or not find_compiler(), reason="needs gcc and Linux")
def test_a_run_whose_storage_fails_goes_on_or_ends_and_can_be_resumed():
    command = [sys.executable, "-m", "scripts.robustness.storage_faults"]
    command += ["--commands", "train", "--count", "3", "--match", "checkpoints|report|tensorboard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("all"), done.stdout
