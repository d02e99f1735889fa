"""The autocast lists equal those of the header in torch's wheel."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from unet3d.memory.autocast import FP32, FP32_BY_DTYPE, PROMOTED, use_cuda_autocast_rules

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"

VERSION_DEPENDENT = {"rms_norm"} | set(
    """cumprod.dimname cumsum.dimname log_softmax.Dimname prod.dim_Dimname softmax.Dimname
    sum.dim_DimnameList""".split()
)
"""Operations that torch 2.10 to 2.13 do not all have; nothing here calls them."""


def read_list(macro):
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", HEADER.read_text())[1]
    entries = re.findall(r"_\(([^()]+)\)", body)
    return {".".join(part.strip() for part in entry.split(",")) for entry in entries}


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_FP32", FP32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", FP32_BY_DTYPE),
        ("AT_FORALL_PROMOTE", PROMOTED),
    ],
)
def test_the_lists_are_those_of_the_installed_torch(macro, ours):
    assert read_list(macro) ^ set(ours) <= VERSION_DEPENDENT


def get_dtype_under_cuda_rules(function, *inputs, dtype=torch.float16):
    with use_cuda_autocast_rules(), torch.autocast("cpu", dtype=dtype):
        return function(*inputs).dtype


def test_interpolation_runs_in_float32_on_cuda_and_in_half_on_a_cpu():
    x = torch.randn(1, 1, 2, 2, 2).bfloat16()

    def up(y):
        return F.interpolate(y, scale_factor=2, mode="trilinear")

    assert get_dtype_under_cuda_rules(up, x, dtype=torch.bfloat16) == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert up(x).dtype == torch.bfloat16


def test_convolutions_run_in_half():
    x, weight = torch.randn(1, 1, 3, 3, 3), torch.randn(1, 1, 3, 3, 3)
    assert get_dtype_under_cuda_rules(F.conv3d, x, weight, dtype=torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize("function", [torch.exp, lambda x: x.sum(), lambda x: x.softmax(0)])
def test_precision_sensitive_operations_run_in_float32(function):
    x = torch.randn(4).bfloat16()
    assert get_dtype_under_cuda_rules(function, x, dtype=torch.bfloat16) == torch.float32


def test_pooling_and_concatenation_keep_half():
    x = torch.randn(1, 1, 2, 2, 2).bfloat16()
    for function in (lambda y: F.max_pool3d(y, 2), lambda y: torch.cat([y, y])):
        assert get_dtype_under_cuda_rules(function, x, dtype=torch.bfloat16) == torch.bfloat16
