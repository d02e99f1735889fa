"""The Triton kernels of the loss without a GPU."""

import pytest
import torch

from scripts.gpu.operations import OperationCounter
from unet3d.custom_ops import simulate_cuda
from unet3d.loss.overlap import DiceCE


@pytest.mark.slow
def test_interpreted_kernels_equal_plain_pytorch(run_interpreted):
    run_interpreted("tests.loss.helpers.interpreted")


@pytest.mark.parametrize("regions", [None, {"a": [1, 2], "b": 2, "c": 1}])
def test_a_gpu_computes_the_loss_and_its_gradient_in_a_few_launches(regions):
    from torch._subclasses.fake_tensor import FakeTensorMode

    loss = DiceCE(regions=regions)
    with FakeTensorMode(allow_non_fake_inputs=True), simulate_cuda(), OperationCounter() as counter:
        logits = torch.zeros(2, 3, 40, 40, 40, dtype=torch.float16, requires_grad=True)
        loss(logits, torch.zeros(2, 40, 40, 40, dtype=torch.uint8)).backward()
    names = [operation.name for operation in counter.operations]
    assert names.count("unet3d::dice_ce_sums") == names.count("unet3d::dice_ce_gradient") == 1
    assert len(names) <= 40
    large = [o.name for o in counter.operations if o.nbytes > 2 * 40**3]
    assert set(large) == {"zeros", "unet3d::dice_ce_sums", "unet3d::dice_ce_gradient"}
