"""Counts of what a training step asks of a GPU."""

from functools import partial

import torch

from scripts.bench.step import build_cuda_step, list_forum_networks
from scripts.gpu.operations import OperationCounter, count_operations, sum_launches


def test_a_step_launches_few_kernels_and_never_waits():
    make = list_forum_networks("small")["fused"]
    operations = count_operations(partial(build_cuda_step, make, [320, 150, 26], 2, "16"))
    assert 450 < sum_launches(operations) <= 900
    assert [operation.name for operation in operations if operation.waits] == []


def test_numbers_that_are_read_or_copied_wait_for_the_gpu():
    x = torch.zeros(3)
    with OperationCounter() as counter:
        x.sum().item()
        x.new_tensor([1.0, 2.0])
        x + 1
    waits = [operation.name for operation in counter.operations if operation.waits]
    assert waits == ["_local_scalar_dense", "lift_fresh"]
