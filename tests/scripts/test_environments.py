"""Some of the scenarios of scripts.robustness.environments."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_commands_end_well_in_hostile_environments():
    command = [sys.executable, "-m", "scripts.robustness.environments", "--match"]
    command += ["SIGTERM during later imports|a launcher that is not a number"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "2 scenarios: 2 passed, 0 failed", done.stdout
