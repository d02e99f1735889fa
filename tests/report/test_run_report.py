import json
import math

import pytest

from unet3d.report.run_report import describe_estimate, write_report
from unet3d.text import MIB


def test_a_report_is_standard_json(tmp_path):
    write_report({"a": math.nan, "b": [math.inf, 1.0], "c": {1: "x"}}, tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert json.loads(text, parse_constant=str) == {"a": None, "b": [None, 1.0], "c": {"1": "x"}}
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


ESTIMATED = {"estimated": {"allocated": 300 * MIB}}
FIRST = {"first_step": {"allocated": 400 * MIB}}
STEADY = {"steady_step": {"allocated": 240 * MIB}}


@pytest.mark.parametrize(
    ("memory", "shown"),
    [
        ({}, None),
        (ESTIMATED | {"first_step": {"resident": MIB}}, "300 MiB of tensors"),
        (ESTIMATED | FIRST, "300 MiB allocated (-25.0% versus measured)"),
        (ESTIMATED | FIRST | STEADY, "300 MiB allocated (+25.0% versus measured)"),
    ],
)
def test_an_estimate_is_compared_with_a_steady_step_if_that_was_measured(memory, shown):
    assert describe_estimate({"memory": memory}) == shown
