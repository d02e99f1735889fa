"""The estimate of a step with several processes, against torch's DistributedDataParallel."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.memory.helpers.oracle import estimate, measure
from unet3d.config.compose import compose_config
from unet3d.machine import Precision
from unet3d.memory.step.gradient_buckets import fill_buckets
from unet3d.memory.step.training_step import NullListener, TrainingStep, make_step_factory
from unet3d.text import MIB
from unet3d.training.config import read_training


def make_factory(*overrides):
    words = ["data.patch_size=[16,16,16]", "data.batch_size=2", "model.width=4", *overrides]
    settings = read_training(compose_config(words, "train"))
    return make_step_factory(settings.step, Precision("32", "32"), cuda=False)


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class AccumulatingDDP(DistributedDataParallel):
    """Exchanges gradients after every second batch, as Lightning does when it accumulates two."""

    batches = 0

    def forward(self, *args):
        self.batches += 1
        self.require_backward_grad_sync = self.batches % 2 == 0
        return super().forward(*args)


@pytest.mark.filterwarnings("ignore:.*allocated before the profiling started")
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        (DistributedDataParallel, ()),
        (DistributedDataParallel, ("model.norm=batch",)),
        (AccumulatingDDP, ("trainer.accumulate_grad_batches=2",)),
    ],
)
def test_a_step_needs_as_much_as_with_ddp(kind, overrides, process_group):
    make_step = make_factory(*overrides)

    def make_ddp_step() -> TrainingStep:
        step = make_step()
        step.model = kind(step.model, gradient_as_bucket_view=True)
        return step

    real = measure(make_ddp_step)
    estimated = estimate(make_factory("trainer.devices=2", *overrides))
    assert estimated.peak == pytest.approx(real.peak, rel=5e-4)  # DDP also copies buffers
    assert estimated.peak > estimate(make_step).peak + 80_000  # the gradients


def test_gradients_are_views_of_the_buckets_and_keep_their_values():
    plain, bucketed = (make_factory(*words)() for words in ((), ("trainer.devices=2",)))
    bucketed.model.load_state_dict(plain.model.state_dict())
    for step in (plain, bucketed):
        step.optimizer.zero_grad = lambda: None
        step.train(NullListener())
    views = bucketed.buckets.views
    for p, q in zip(plain.model.parameters(), bucketed.model.parameters(), strict=True):
        assert q.grad.equal(p.grad)
        assert q.grad.data_ptr() == views[q].data_ptr()


def test_buckets_are_full_from_a_number_of_bytes_on_and_have_one_type():
    tensors = [torch.empty(n * MIB // 4) for n in (1, 20, 4, 1, 30, 2)]
    tensors[3] = tensors[3].half()
    groups = fill_buckets(tensors, [MIB, 25 * MIB])
    assert [[t.nbytes / MIB for t in group] for group in groups] == [[1], [20, 4, 30], [0.5], [2]]
