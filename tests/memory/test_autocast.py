"""The autocast lists equal those of the header in torch's wheel."""

import re
from pathlib import Path

import pytest
import torch

from unet3d.memory.autocast import FP32, FP32_BY_DTYPE, PROMOTED

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
