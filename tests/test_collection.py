"""Nothing is skipped in silence: pytest finds every test file and every doctest of the tree."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


@pytest.fixture(scope="module")
def collected() -> Counter[str]:
    """Number of collected items by file, GPU tests included."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu or not gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    return Counter(line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line)


def test_every_test_file_is_collected(collected):
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert not files - collected.keys()


def test_every_doctest_is_collected(collected):
    for path in sorted((ROOT / "unet3d").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        docstrings = [
            ast.get_docstring(node) or "" for node in nodes if isinstance(node, DOCUMENTED)
        ]
        examples = sum(">>> " in text for text in docstrings)
        assert collected[str(path.relative_to(ROOT))] == examples, path
