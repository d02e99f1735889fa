"""Counts of what a training step asks of a GPU."""

from functools import partial

import pytest

from scripts.gpu.operations import count_operations, sum_launches
from unet3d.machine import Precision
from unet3d.memory.traced_step import build_traced_step

FORUM = "experiment=example_small model=unet_small"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "most"),
    [
        (f"{FORUM} checkpointing=fused", 320),
        (f"{FORUM} checkpointing=leanest checkpointing.tile_mib=64", 1300),
        (f"{FORUM} checkpointing=fused checkpointing.tile_mib=64", 800),
        ("model=unet_nnunet data.patch_size=[128,128,128]", 480),
        ("experiment=resenc_l", 1400),
        ("experiment=resenc_l checkpointing=lean", 1420),
    ],
)
def test_a_step_launches_few_kernels_and_never_waits(composed, words, most):
    tiles = ["checkpointing.tile_mib=2048"] if "tile_mib" not in words else []
    step = composed(*words.split(), *tiles, "precision=16", base=[]).step
    make_step = partial(build_traced_step, step, Precision("16", "16"), cuda=True)
    operations = count_operations(make_step)
    assert 0.9 * most < sum_launches(operations) <= most
    assert [operation.name for operation in operations if operation.waits] == []
