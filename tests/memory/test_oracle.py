"""The estimate against real training steps on a CPU, in float32, for all options that matter.

They must be equal. oracle.py lists what neither side counts, with the reasons.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.config.helpers.configs import SHRUNK
from tests.memory.helpers.oracle import estimate, measure
from unet3d.config.compose import compose_config, list_options
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.loss.overlap import DiceCE
from unet3d.machine import Precision
from unet3d.memory.traced_step import TracedStep, build_traced_step
from unet3d.step.training_step import RandomBatchStep
from unet3d.training.config import parse_train_config

Join = Callable[[Tensor, Tensor, Tensor], Tensor]

SMALL = ("data.patch_size=[16,16,16]", "data.batch_size=2")
NARROW = ("model.width=4",)
ODD = ("data.patch_size=[18,17,13]", "model.norm=batch")


STRATEGIES = [option for option in list_options("checkpointing") if option != "auto"]
MODELS = [option for option in list_options("model") if option != "unet_tiny"]
POOLS = [option for option in list_options("pool") if option != "max"]
EVERY_OPTION = [
    *(
        (f"model={model}", f"checkpointing={strategy}", *SHRUNK.get(model, NARROW))
        for model in MODELS
        for strategy in ("none", "blocks", "fused", "leanest")
        if strategy in ("none", "blocks") or model.startswith("unet_")
    ),
    *((f"checkpointing={strategy}", *NARROW) for strategy in STRATEGIES),
    *(
        (f"pool={pool}", f"checkpointing={strategy}", "model.norm=batch", *NARROW)
        for pool in POOLS
        for strategy in ("fused", "leanest")
    ),
    *(
        (f"optimizer={optimizer}", f"model.norm={norm}", *NARROW)
        for optimizer, norm in zip(list_options("optimizer"), cycle(("batch", "group", "none")))
    ),
]
OTHER_OPTIONS = [
    ("data.batch_size=1",),
    (*ODD, "data.batch_size=1"),
    (*ODD, "model.upsampling=nearest", "model.deep_supervision=true", "model.depth=4"),
    (*ODD, "model.upsampling=transposed", "model.convs_per_level=1", "model.activation=relu"),
    ("checkpointing.tile_mib=2048", "model.upsampling=transposed", "data.batch_size=1"),
    ("checkpointing=lean", "checkpointing.tile_mib=2048", *ODD),
    ("checkpointing=blocks", "checkpointing.levels=[0]", "trainer.gradient_clip_val=null"),
    ("trainer.accumulate_grad_batches=3", "lr_factors={encoder:0.1}"),
    ("head_warmup=0.2", "ema_decay=0.9"),
    ("freeze=[encoder]", "checkpointing=none", "model.norm=batch"),
    ("freeze=[encoder]", "checkpointing=leanest", "model.norm=batch"),
    ("freeze=[encoder.0]", "checkpointing=fused"),
    ("freeze=[decoder,heads]", "checkpointing=fused", "model.norm=batch"),
    ("freeze=[decoder,heads]", "checkpointing=leanest"),
    ("data.annotated={*1:[ball],*2:[tube,box]}",),
]
RESIDUAL = (*SHRUNK["dynunet"], "model=dynunet", "+model.res_block=true")
MEDNEXT = [("model=mednext", f"checkpointing={s}", *SHRUNK["mednext"]) for s in ("fused", "lean")]
CASES = [*EVERY_OPTION, *((*NARROW, *words) for words in OTHER_OPTIONS), RESIDUAL, *MEDNEXT]

OTHER_KERNELS = (
    *("model=basic_unet", "model=mednext", "model=unetr", "model=swin_unetr"),
    "data.annotated=",
)
"""Cases whose convolutions, norms or logsumexp allocate more on a CPU, off the peak."""


QUICK = [(f"checkpointing={strategy}", *NARROW) for strategy in ("none", "fused", "leanest")]


def mark_larger_networks(case: tuple[str, ...]) -> Any:
    """Mark the cases of the largest networks as long, and all but a few as slow."""
    is_largest = {"model=unetr", "model=swin_unetr"} & {*case}
    marks = pytest.mark.long if is_largest else pytest.mark.slow
    return pytest.param(case, marks=() if case in QUICK else marks)


def make_factory(*words: str) -> Callable[[], RandomBatchStep]:
    settings = parse_train_config(compose_config([*SMALL, *words], "train"))
    return partial(build_traced_step, settings.step, Precision("32", "32"), cuda=False)


@pytest.mark.parametrize("case", [*map(mark_larger_networks, CASES)], ids=" ".join)
def test_the_estimated_peak_is_the_measured_one_to_the_byte_and_so_is_the_order(case):
    make_step = make_factory(*case)
    estimated, measured = estimate(make_step), measure(make_step)
    assert estimated.before == measured.before
    assert estimated.peak == measured.peak
    if not any(word.startswith(OTHER_KERNELS) for word in case):
        assert estimated.sequence == measured.sequence


class Joined(nn.Module):
    """Two convolutions whose outputs are joined, so that gradients add up at their input."""

    def __init__(self, join: Join):
        super().__init__()
        self.join = join
        self.first, self.a, self.b = (nn.Conv3d(n, 4, 3, padding=1) for n in (1, 4, 4))
        self.norms = nn.ModuleList(nn.InstanceNorm3d(4, affine=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.norms[0](self.first(x)), inplace=True)
        a = F.leaky_relu(self.norms[1](self.a(x)), inplace=True)
        return self.join(x, a, self.b(x))


@pytest.mark.parametrize(
    "join",
    [
        pytest.param(lambda x, a, b: x + a, id="residual"),
        pytest.param(lambda x, a, b: a + a, id="twice"),
        pytest.param(lambda x, a, b: a + b, id="branches"),
        pytest.param(lambda x, a, b: x + a + b, id="three"),
        pytest.param(lambda x, a, b: x.flatten(2).view_as(x) + b, id="view"),
        pytest.param(lambda x, a, b: a * b, id="product"),
    ],
)
def test_gradients_that_add_up_take_the_memory_of_autograd(join):
    def make_step() -> RandomBatchStep:
        model, loss = Joined(join), DiceCE()
        loss.check_labels = None  # as in training
        return TracedStep(
            model=model,
            loss=loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            sliding_window=SlidingWindow([8, 8, 8]),
            batch_shape=(2, 1, 8, 8, 8),
            volume_shape=(1, 1, 8, 8, 8),
        )

    estimated, measured = estimate(make_step), measure(make_step)
    assert estimated.peak == measured.peak
    assert estimated.sequence == measured.sequence


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
def test_a_step_of_several_processes_needs_as_much_as_with_ddp(kind, overrides, process_group):
    make_step = make_factory(*NARROW, *overrides)

    def make_ddp_step() -> RandomBatchStep:
        step = make_step()
        step.model = kind(step.model, gradient_as_bucket_view=True)
        return step

    real = measure(make_ddp_step)
    estimated = estimate(make_factory("trainer.devices=2", *NARROW, *overrides))
    assert estimated.peak == pytest.approx(real.peak, rel=5e-4)  # DDP also copies buffers
    assert estimated.peak > estimate(make_step).peak + 80_000  # the gradients
