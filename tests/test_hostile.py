"""Some of the corrupted inputs of `scripts/hostile.py`, each met by its command."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SLOW = "bit flip|(NIfTI|gzip|checkpoint).*train"  # they train before they are refused


def test_no_corrupted_input_ends_in_a_traceback_a_hang_or_a_wrong_result():
    words = [sys.executable, "scripts/hostile.py", "--only", "20", "--without", SLOW]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("all"), done.stdout
