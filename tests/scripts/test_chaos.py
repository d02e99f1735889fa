"""The short form of scripts.chaos: two SIGKILLs, and a SIGTERM with one rank and with two."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_interrupted_runs_end_like_uninterrupted_ones():
    command = [sys.executable, "-m", "scripts.chaos", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
