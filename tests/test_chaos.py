"""The short form of `scripts/chaos.py`: two kills, and a SIGTERM with one rank and with two."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_runs_that_are_killed_and_stopped_end_as_if_they_had_been_left_alone():
    words = [sys.executable, "scripts/chaos.py", "--quick"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
