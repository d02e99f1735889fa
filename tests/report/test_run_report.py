import json
import math
import shlex

import pytest
from tensorboard.backend.event_processing.data_ingester import _parse_event_files_spec
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from torch.utils.tensorboard.writer import SummaryWriter

from unet3d.report.run_report import (
    format_tensorboard_command,
    make_estimate_rows,
    write_report,
)
from unet3d.units import MIB


def test_a_report_is_standard_json(tmp_path):
    write_report({"a": math.nan, "b": [math.inf, 1.0], "c": {1: "x"}}, tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert json.loads(text, parse_constant=str) == {"a": None, "b": [None, 1.0], "c": {"1": "x"}}
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("name", ["14-30-00", "my run's", "pool=max,fold=0", "a:b"])
def test_the_printed_command_shows_a_run_under_its_folder_name(tmp_path, name):
    with SummaryWriter(str(tmp_path / name / "tensorboard")) as writer:
        writer.add_scalar("loss", 1.0)
    option, value = shlex.split(format_tensorboard_command(str(tmp_path / name)))[1:]
    shown, spec = EventMultiplexer(), option == "--logdir_spec"
    for path, group in (_parse_event_files_spec(value) if spec else {value: None}).items():
        shown.AddRunsFromDirectory(path, group)
    assert list(shown.Runs()) == [f"{name}/tensorboard"]


@pytest.mark.parametrize(
    ("memory", "shown"),
    [
        ({}, None),
        ({"estimated": {"allocated": 300 * MIB}}, "300 MiB of tensors"),
        (
            {"estimated": {"allocated": 300 * MIB}, "first_step": {"resident": MIB}},
            "300 MiB of tensors",
        ),
        (
            {"estimated": {"allocated": 300 * MIB}, "first_step": {"allocated": 400 * MIB}},
            "300 MiB allocated (-25.0% versus measured)",
        ),
        (
            {
                "estimated": {"allocated": 300 * MIB},
                "first_step": {"allocated": 400 * MIB},
                "steady_step": {"allocated": 240 * MIB},
            },
            "300 MiB allocated (+25.0% versus measured)",
        ),
    ],
)
def test_an_estimate_is_compared_with_a_steady_step_if_that_was_measured(memory, shown):
    assert make_estimate_rows({"memory": memory}) == (
        [] if shown is None else [("estimated peak", shown)]
    )
