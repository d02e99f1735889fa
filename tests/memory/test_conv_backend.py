"""Convolutions that torch does not give to cuDNN, against failed requests on real GPUs."""

import csv
import json
import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.memory.helpers.evidence import EVIDENCE
from unet3d.__main__ import main
from unet3d.errors import UsageError
from unet3d.memory.allocator import replay
from unet3d.memory.conv_backend import CudnnRules, get_installed_rules, parse_rules
from unet3d.memory.estimate import simulate_cuda_step
from unet3d.memory.trace import Trace
from unet3d.units import GIB

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
OLD = CudnnRules(torch=(2, 3, 1), cudnn=8902)


def read_issues():
    with (EVIDENCE / "conv3d_issues.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def trace_conv(x_shape, out_channels, padding, dtype, rules, *, channels_last=False, calls=1):
    with FakeTensorMode(), simulate_cuda_step(), torch.no_grad():
        conv = nn.Conv3d(x_shape[1], out_channels, 3, padding=padding, dtype=dtype)
        trace = Trace(cuda=True, rules=rules)
        with trace.record(conv):
            trace.begin_phase("forward")
            format = torch.channels_last_3d if channels_last else torch.contiguous_format
            x, out = torch.empty(x_shape, dtype=dtype, memory_format=format), None
            for _ in range(calls):
                out = conv(x)  # the output of the previous call lives until then
            del out
    return trace


VERSIONS = {
    "pytorch#95024": OLD,
    "pytorch#132300": CudnnRules(torch=(2, 4, 0), cudnn=90_100),
    "A100, torch 2.9.1, cuDNN 9.15.1": parse_rules("2.9.1", "9.15.1"),
    "torch 2.8.0 and 2.9.1": parse_rules("2.8.0", "9.10.2"),
}
"""Versions by source or machine. Those of the first two are not stated: older ones."""
UNITS = {"bytes": 1, "GiB": GIB, "": GIB}


PEAKS = [
    row
    for row in read_issues()
    if row["figure"].startswith("max_allocated") and row["source"] != "pytorch#128947"
]
"""Peaks with digits; of processes with no other tensors."""


@pytest.mark.parametrize("issue", PEAKS, ids=lambda r: f"{r['source']} {r['machine']}")
def test_peaks_of_single_convolutions_are_within_one_percent(issue, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    new = parse_rules("2.9.1", "9.10.2")
    rules = VERSIONS.get(issue["source"], VERSIONS.get(issue["machine"], new))
    shape, channels = json.loads(issue["input"]), int(issue["out_channels"])
    calls = 3 if issue["figure"].endswith("loop") else 1
    dtype, padding = TYPES[issue["dtype"]], int(issue["padding"])
    trace = trace_conv(shape, channels, padding, dtype, rules, calls=calls)
    peak = max(replay(trace.events, [block.nbytes for block in trace.blocks]).allocated)
    unit = UNITS[re.split("[ ,;]", issue["note"])[0]]
    assert peak == pytest.approx(float(issue["value"]) * unit, rel=0.01)


def test_there_are_seven_precise_peaks():
    assert len(PEAKS) == 7


def get_columns(trace):
    return [block.nbytes for block in trace.blocks if block.op == "convolution: columns"]


@pytest.mark.parametrize(
    "issue", [row for row in read_issues() if row["figure"] == "tried"], ids=lambda r: r["source"]
)
def test_failed_requests_are_found_to_the_printed_digit(issue):
    shape, channels = json.loads(issue["input"]), int(issue["out_channels"])
    dtype = TYPES[issue["dtype"]]
    (columns,) = get_columns(trace_conv(shape, channels, int(issue["padding"]), dtype, OLD))
    assert f"{columns / GIB:.2f}" == f"{float(issue['value']):.2f}"


def test_there_are_three_failed_requests():
    assert len([row for row in read_issues() if row["figure"] == "tried"]) == 3


@pytest.mark.parametrize(
    ("dtype", "versions", "channels_last", "has_columns"),
    [
        ("bf16", ("2.9.1", "9.10.2"), False, True),
        ("fp16", ("2.10", "9.14"), False, True),
        ("bf16", ("2.9.1", "9.10.2"), True, False),
        ("bf16", ("2.9.0", "9.10.2"), True, True),
        ("bf16", ("2.9.1", "9.15.1"), False, False),
        ("bf16", ("2.8.0", "9.10.2"), False, False),
        ("fp32", ("2.9.1", "9.10.2"), False, False),
    ],
)
def test_half_precision_avoids_some_versions(dtype, versions, channels_last, has_columns):
    rules = parse_rules(*versions)
    shape = (1, 96, 6, 62, 62)
    trace = trace_conv(shape, 96, 0, TYPES[dtype], rules, channels_last=channels_last)
    columns = get_columns(trace)
    assert columns == ([96 * 27 * 4 * 60 * 60 * 2] if has_columns else [])
    assert any(block.kind == "workspaces" for block in trace.blocks) is not has_columns


def test_backward_allocates_columns_too():
    with FakeTensorMode(), simulate_cuda_step():
        conv = nn.Conv3d(4, 4, 3, dtype=torch.float16)
        trace = Trace(cuda=True, rules=parse_rules("2.9.1", "9.10"))
        with trace.record(conv):
            trace.begin_phase("forward")
            out = conv(torch.empty(2, 4, 8, 8, 8, dtype=torch.float16))
            trace.begin_phase("backward")
            out.sum().backward()
    assert len(get_columns(trace)) == 2


def test_large_samples_need_a_new_cudnn():
    shape = (1, 128, 256, 256, 256)
    new = CudnnRules(torch=(2, 10, 0), cudnn=90_300)
    assert not get_columns(trace_conv(shape, 128, 1, torch.float32, new))
    assert get_columns(trace_conv(shape, 128, 1, torch.float32, OLD))


def test_a_cpu_build_of_torch_is_taken_for_one_with_a_new_cudnn():
    rules = get_installed_rules()
    assert rules.torch[0] == 2
    assert rules.cudnn >= 90_000
    with pytest.raises(UsageError, match="torch must be a version such as 2"):
        parse_rules("new", None)


SMALL = ("data.patch_size=[32,32,32]", "model.width=8", "precision=16")


@pytest.mark.slow
def test_the_command_estimates_for_versions_that_are_asked_for(capsys):
    words = ["memory", "checkpointing=none", *SMALL]
    peaks = []
    for versions in (["torch=2.9.1", "cudnn=9.10.2"], ["torch=2.9.1", "cudnn=9.15.1"]):
        assert main([*words, *versions, "format=json"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_allocated_bytes"])
    assert peaks[0] > peaks[1]
    assert main([*words, "torch=2.9.1", "cudnn=9.10.2"]) == 0
    assert "torch computes some convolutions without cuDNN" in capsys.readouterr().out
    assert main(["memory", *SMALL, "torch=2.9.1", "cudnn=9.10.2"]) == 0
    assert "without cuDNN" not in capsys.readouterr().out  # fused blocks are channels-last


def test_a_version_that_yaml_takes_for_a_number_is_refused(capsys):
    assert main(["memory", *SMALL, "cudnn=9.10"]) == 2
    assert "cudnn must be a version with three parts" in capsys.readouterr().err
