"""Examples in docstrings of scripts; pytest collects only those of unet3d."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATHS = [p for p in sorted((ROOT / "scripts").rglob("*.py")) if ">>> " in p.read_text()]
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PATHS]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_scripts_are_true(name):
    results = doctest.testmod(import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
