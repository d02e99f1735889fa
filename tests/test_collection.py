"""Nothing is skipped in silence: pytest finds every test file and every doctest of the tree."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import COLLECTED

ROOT = Path(__file__).parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


@pytest.fixture
def collected(pytestconfig) -> Counter[str]:
    """Number of collected items by file, deselected ones included."""
    if [Path(arg).name for arg in pytestconfig.args] != pytestconfig.getini("testpaths"):
        pytest.skip("only some of the tests were asked for")
    return COLLECTED


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
