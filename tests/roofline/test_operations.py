"""Counts of what a training step asks of a GPU."""

from functools import partial

import pytest
import torch
from torch import Tensor

from scripts.bench.step import build_cuda_step, list_forum_networks
from scripts.gpu.operations import (
    CUSTOM_LAUNCHES,
    OperationCounter,
    count_operations,
    sum_launches,
)
from unet3d.loss.kernels import cuda as loss_cuda
from unet3d.model.fused.kernels import cuda as fused_cuda
from unet3d.pool.kernels import cuda as pool_cuda
from unet3d.pool.windows import PoolWindows


@pytest.mark.parametrize(("strategy", "budget"), [("fused", 900), ("lean", 1050)])
def test_a_step_launches_few_kernels_and_never_waits(strategy, budget):
    make = list_forum_networks("small")[strategy]
    operations = count_operations(partial(build_cuda_step, make, [320, 150, 26], 2, "16"))
    assert budget / 2 < sum_launches(operations) <= budget
    assert [operation.name for operation in operations if operation.waits] == []


def test_numbers_that_are_read_or_copied_wait_for_the_gpu():
    x = torch.zeros(3)
    with OperationCounter() as counter:
        x.sum().item()
        x.new_tensor([1.0, 2.0])
        x + 1
    waits = [operation.name for operation in counter.operations if operation.waits]
    assert waits == ["_local_scalar_dense", "lift_fresh"]


def make_map(*shape: int) -> Tensor:
    return torch.zeros(shape).contiguous(memory_format=torch.channels_last_3d)


@pytest.fixture
def launched(monkeypatch):
    """Count the kernels that the CUDA code of an operator launches: Triton's and torch's."""
    launches = []
    for module in (fused_cuda, pool_cuda, loss_cuda):
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: launches.append(kernel))

    def count(function, *arguments) -> int:
        launches.clear()
        with OperationCounter() as counter:
            function(*arguments)
        return len(launches) + sum_launches(counter.operations)

    return count


def test_operators_of_fused_blocks_launch_as_many_kernels_as_are_counted(launched):
    y, numbers, sums = make_map(2, 4, 3, 4, 5), [torch.zeros(2, 4)] * 4, torch.zeros(2, 2, 4)
    up, axes = make_map(2, 4, 6, 8, 10), [0, 6, 0, 3, 0, 8, 0, 4, 0, 10, 0, 5]
    fold = (sums, 60, 4, True, 1e-5, *(torch.zeros(4),) * 5)
    counts = {
        "add_moments": launched(fused_cuda.add_moments, y, 0, sums),
        "normalize": launched(fused_cuda.normalize, y, *numbers[:2], 0.0, True, y),
        "add_norm_gradient_sums": launched(
            lambda: fused_cuda.add_gradient_sums(y, y, *numbers, slope=0.0, first=True, sums=sums)
        ),
        "norm_gradient": launched(lambda: fused_cuda.gradient(y, y, *numbers, slope=0.0, out=y)),
        "activation_gradient": launched(fused_cuda.activation_gradient, y, 0.0, y),
        "fold_statistics": launched(
            lambda: fused_cuda.fold_statistics(*fold, momentum=0.1, out=torch.empty(4, 2, 4))
        ),
        "fold_gradient": launched(fused_cuda.fold_gradient, sums, *numbers[:3], 60, 4, True, sums),
        "interpolate": launched(fused_cuda.interpolate, y, axes, True, up),
        "interpolate_gradient": launched(fused_cuda.interpolate_gradient, up, axes, True, y),
    }
    assert counts == {name: CUSTOM_LAUNCHES[f"unet3d::{name}"] for name in counts}


@pytest.mark.parametrize("pool", ["max", "median", "avg", "approx_median"])
def test_poolings_launch_as_many_kernels_as_are_counted(pool, launched):
    x, windows = make_map(1, 4, 4, 4, 4), PoolWindows.from_args(2, None, 0)
    y, codes = pool_cuda.forward(x, pool, windows, 0.1)
    forward = launched(pool_cuda.forward, x, pool, windows, 0.1)
    backward = launched(pool_cuda.backward, y, pool, windows, x.shape, True, codes, x, 0.1)
    operators = {"max": "pool_scatter", "median": "pool_scatter"}
    name = operators.get(pool, f"{pool}_pool3d_backward")
    assert forward == CUSTOM_LAUNCHES[f"unet3d::{pool}_pool3d"]
    assert backward == CUSTOM_LAUNCHES[f"unet3d::{name}"]


def test_the_loss_launches_as_many_kernels_as_are_counted(launched):
    logits, labels = torch.zeros(2, 3, 4, 4, 4), torch.zeros(2, 4, 4, 4, dtype=torch.uint8)
    sums = launched(loss_cuda.sum_terms, logits, labels, None, 0.0)
    gradient = launched(loss_cuda.compute_gradient, logits, labels, None, torch.zeros(3, 2, 3), 0.0)
    assert sums == CUSTOM_LAUNCHES["unet3d::dice_ce_sums"]
    assert gradient == CUSTOM_LAUNCHES["unet3d::dice_ce_gradient"]
