"""Synchronized batch norm in fused blocks: two ranks equal one with both batches."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from unet3d.model.unet import UNet3D
from unet3d.types import Retention


def run_step(model, x):
    loss = model(x).square().mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    statistics = [b for name, b in model.named_buffers() if "num_batches" not in name]
    return gradients, statistics


def make_network():
    torch.manual_seed(0)
    model = UNet3D(in_channels=1, num_classes=3, depth=2, width=4, norm="batch", pool=nn.MaxPool3d)
    model.retention = Retention(("recompute", "store_last"), ("store_all",))
    return model.double()


def run_rank(rank, images, init_file, output):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_file, rank=rank, world_size=2)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(make_network())
    gradients, statistics = run_step(model, images[2 * rank : 2 * rank + 2])
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= 2
    if rank == 0:
        torch.save((gradients, statistics), output)
    dist.barrier()  # a rank that leaves early aborts the other
    dist.destroy_process_group()


@pytest.mark.slow
def test_synchronized_batch_norm_equals_that_of_the_full_batch(tmp_path):
    images = torch.randn(4, 1, 9, 8, 8, dtype=torch.float64)
    gradients, statistics = run_step(make_network(), images)
    output = tmp_path / "output.pt"
    init_file = f"file://{tmp_path / 'init'}"
    mp.spawn(run_rank, (images, init_file, output), nprocs=2)
    gradients2, statistics2 = torch.load(output, weights_only=True)
    for a, b in zip([*gradients, *statistics], [*gradients2, *statistics2], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)
