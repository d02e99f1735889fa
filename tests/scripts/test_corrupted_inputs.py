"""A sample of the corrupted inputs of scripts.robustness."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SLOW = "bit flip|(NIfTI|gzip|checkpoint).*train"  # these train before they are refused


def test_no_corrupted_input_ends_in_a_traceback_a_hang_or_a_wrong_result():
    command = [sys.executable, "-m", "scripts.robustness.corrupted_inputs"]
    command += ["--count", "20", "--exclude", SLOW]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("all"), done.stdout
