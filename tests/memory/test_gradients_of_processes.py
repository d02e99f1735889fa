"""The estimate of a step with several processes, against torch's DistributedDataParallel."""

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.memory.helpers.oracle import estimate, measure
from unet3d.config.compose import compose_config
from unet3d.machine import Precision
from unet3d.memory.step.training_step import TrainingStep, make_step_factory
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
