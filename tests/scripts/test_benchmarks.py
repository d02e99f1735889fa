"""Benchmarks: examples in docstrings, and the report of a GPU without one."""

import copy
import doctest
from importlib import import_module

import pytest
import torch

from scripts.bench.results import ROOT
from scripts.bench.rivals import CheckpointedConvs
from scripts.bench.step import build_ours
from scripts.gpu import report, rows

PATHS = [p for p in sorted((ROOT / "scripts").rglob("*.py")) if ">>> " in p.read_text()]
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PATHS]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_scripts_are_true(name):
    results = doctest.testmod(import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_a_network_with_checkpoints_between_convolutions_computes_what_its_modules_do():
    plain = build_ours([4, 8, 16], "none", norm="batch").double()
    rival = CheckpointedConvs(copy.deepcopy(plain))
    image = torch.randn(2, 1, 13, 12, 14, dtype=torch.float64)
    for network in (plain, rival):
        network(image).square().mean().backward()
    for own, other in zip(plain.parameters(), rival.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    for own, other in zip(plain.buffers(), rival.buffers(), strict=True):
        torch.testing.assert_close(own, other)


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
