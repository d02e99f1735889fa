"""Fused blocks in two processes: synchronized batch norm, and wrappers that read lazy logits."""

from functools import partial
from itertools import chain

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from unet3d.loss.overlap import DiceCE
from unet3d.model.unet import UNet3D
from unet3d.types import Retention


def run_step(model, x):
    model(x).square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    statistics = [b for name, b in model.named_buffers() if "num_batches" not in name]
    return gradients, statistics


def make_network():
    torch.manual_seed(0)
    model = UNet3D(in_channels=1, num_classes=3, depth=2, width=4, norm="batch", pool=nn.MaxPool3d)
    model.retention = Retention(encoder_last=("recompute", "store"))
    return model.double()


def assert_equal(results, expected):
    for a, b in zip(chain(*results), chain(*expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def run_rank(rank, images, init_file, output):
    """Run three volumes or two, with the statistics of both ranks and with those of this one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_file, rank=rank, world_size=2)
    convert, own = nn.SyncBatchNorm.convert_sync_batchnorm, images[:3] if rank == 0 else images[3:]
    alone = [dist.new_group([n]) for n in range(2)][rank]
    assert_equal(run_step(convert(make_network(), alone), own), run_step(make_network(), own))
    gradients, statistics = run_step(convert(make_network()), own)
    for gradient in gradients:
        dist.all_reduce(gradient)
    if rank == 0:
        torch.save((gradients, statistics), output)
    dist.barrier()  # a rank that leaves early aborts the other
    dist.destroy_process_group()


@pytest.mark.slow
def test_synchronized_batch_norm_equals_that_of_the_full_batch(tmp_path):
    images = torch.randn(5, 1, 9, 8, 8, dtype=torch.float64)
    expected = run_step(make_network(), images)
    output = tmp_path / "output.pt"
    init_file = f"file://{tmp_path / 'init'}"
    mp.spawn(run_rank, (images, init_file, output), nprocs=2)
    assert_equal(torch.load(output, weights_only=True), expected)


def test_synchronized_batch_norm_of_one_process_is_batch_norm():
    images = torch.randn(2, 1, 9, 8, 8, dtype=torch.float64)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(make_network())
    assert_equal(run_step(model, images), run_step(make_network(), images))


WRAPPERS = {
    "static graph": partial(DistributedDataParallel, static_graph=True),
    "unused parameters": partial(DistributedDataParallel, find_unused_parameters=True),
    "FSDP": fully_shard,
}


def train_wrapped(wrapper, image, *, lazy):
    torch.manual_seed(0)
    network = UNet3D(in_channels=1, num_classes=9, depth=4, width=4, deep_supervision=True)
    network = WRAPPERS[wrapper](network.double())
    optimizer, loss = torch.optim.SGD(network.parameters(), 0.1), DiceCE()
    for _ in range(3):
        optimizer.zero_grad()
        loss(network(image, lazy_logits=lazy), image[:, 0].gt(0).long()).backward()
        optimizer.step()
    return [getattr(p, "full_tensor", lambda p=p: p)() for p in network.parameters()]


def compare_lazy_logits(rank, wrapper, images, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_file, rank=rank, world_size=2)
    expected = train_wrapped(wrapper, images[rank], lazy=False)
    assert_equal([train_wrapped(wrapper, images[rank], lazy=True)], [expected])
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ranks_train_equally_with_lazy_logits(wrapper, tmp_path):
    images = torch.randn(2, 1, 1, 16, 16, 16, dtype=torch.float64)
    mp.spawn(compare_lazy_logits, (wrapper, images, f"file://{tmp_path / 'init'}"), nprocs=2)
