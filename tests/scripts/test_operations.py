"""Counts of what a training step asks of a GPU."""

from functools import partial

from scripts.bench.step import build_cuda_step, list_forum_networks
from scripts.gpu.operations import count_operations, sum_launches


def test_a_step_launches_few_kernels_and_never_waits():
    make = list_forum_networks("small")["fused"]
    operations = count_operations(partial(build_cuda_step, make, [320, 150, 26], 2, "16"))
    assert 450 < sum_launches(operations) <= 900
    assert [operation.name for operation in operations if operation.waits] == []
