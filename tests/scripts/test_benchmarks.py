"""Benchmarks: examples in docstrings, and the report of a GPU without one."""

import doctest
from importlib import import_module

import pytest

from scripts.bench.results import ROOT
from scripts.gpu import report, rows

PATHS = [p for p in sorted((ROOT / "scripts").rglob("*.py")) if ">>> " in p.read_text()]
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PATHS]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_scripts_are_true(name):
    results = doctest.testmod(import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.long
def test_a_rehearsal_measures_all_parts_on_a_cpu(tmp_path):
    assert report.main(["--rehearse", "--output", str(tmp_path)]) == 0
    parts = rows.read_parts(tmp_path / "rehearsal.json")
    assert {name: part["state"] for name, part in parts.items()} == dict.fromkeys(
        report.PARTS, "done"
    )
    assert parts["forum"]["rows"]["small, plain modules"]["step_seconds"] > 0
    assert "allocated_error_percent" in next(iter(parts["predict"]["rows"].values()))
    (tuned,) = parts["tuned"]["rows"].items()
    assert tuned[0] == "nnU-Net PlainConvUNet, channels-last"
    assert "predicted" not in tuned[1]
    assert parts["lightning"]["rows"]["fused"]["peak"]
    assert not (report.BENCHMARKS / "rehearsal.json").exists()
