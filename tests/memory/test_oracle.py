"""The estimate against real training steps on a CPU, in float32, for all options that matter.

They must be equal. oracle.py lists what neither side counts, with the reasons.
"""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.config.helpers.configs import SHRUNK
from tests.memory.helpers.oracle import estimate, measure
from unet3d.config.compose import compose_config, list_options
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.loss.overlap import DiceCE
from unet3d.machine import Precision
from unet3d.memory.step.training_step import TrainingStep, make_step_factory
from unet3d.training.config import read_training

Join = Callable[[Tensor, Tensor, Tensor], Tensor]

SMALL = ("data.patch_size=[16,16,16]", "data.batch_size=2")
NARROW = ("model.width=4",)
ODD = ("data.patch_size=[18,17,13]", "model.norm=batch")


STRATEGIES = [option for option in list_options("checkpointing") if option != "auto"]
EVERY_OPTION = [
    *(
        (f"model={model}", f"checkpointing={strategy}", *SHRUNK.get(model, NARROW))
        for model in list_options("model")
        for strategy in ("none", "blocks", "fused", "leanest")
        if strategy in ("none", "blocks") or model.startswith("unet_")
    ),
    *(
        (f"pool={pool}", f"checkpointing={strategy}", "model.norm=batch", *NARROW)
        for pool in list_options("pool")
        for strategy in (STRATEGIES if pool == "max" else ("fused", "leanest"))
    ),
    *(
        (f"optimizer={optimizer}", f"model.norm={norm}", *NARROW)
        for optimizer, norm in zip(list_options("optimizer"), cycle(("batch", "instance")))
    ),
]
OTHER_OPTIONS = [
    ("data.batch_size=1",),
    ("data.batch_size=1", "model.norm=batch"),
    ODD,
    (*ODD, "model.upsampling=nearest"),
    (*ODD, "model.upsampling=transposed"),
    ("model.norm=group",),
    ("model.norm=none",),
    ("model.deep_supervision=true", "model.depth=4"),
    ("model.convs_per_level=1", "model.activation=relu"),
    ("checkpointing=blocks", "checkpointing.levels=[0]"),
    ("trainer.accumulate_grad_batches=3",),
    ("trainer.gradient_clip_val=null",),
    *(
        (f"freeze={parts}", f"checkpointing={strategy}", "model.norm=batch")
        for parts in ("[encoder]", "[encoder.0]", "[decoder,heads]")
        for strategy in ("none", "fused", "leanest")
    ),
    ("head_warmup=0.2",),
    ("lr_factors={encoder:0.1}",),
    ("ema_decay=0.9",),
    ("data.annotated={*1:[ball],*2:[tube,box]}",),
]
RESIDUAL = (*SHRUNK["dynunet"], "model=dynunet", "+model.res_block=true")
CASES = [*EVERY_OPTION, *((*NARROW, *words) for words in OTHER_OPTIONS), RESIDUAL]

OTHER_KERNELS = ("model=basic_unet", "model=unetr", "model=swin_unetr", "data.annotated=")
"""Cases whose convolutions, norms or logsumexp allocate more on a CPU, off the peak."""


def mark_larger_networks(case: tuple[str, ...]) -> Any:
    """Mark the cases of other networks than unet_tiny as slow, those of the largest as long."""
    names = [word for word in case if word.startswith("model=") and word != "model=unet_tiny"]
    is_largest = {"model=unetr", "model=swin_unetr"} & set(names)
    marks = pytest.mark.long if is_largest else pytest.mark.slow
    return pytest.param(case, marks=marks if names else ())


@pytest.mark.parametrize("case", [*map(mark_larger_networks, CASES)], ids=" ".join)
def test_the_estimated_peak_is_the_measured_one_to_the_byte_and_so_is_the_order(case):
    settings = read_training(compose_config([*SMALL, *case], "train"))
    make_step = make_step_factory(settings.step, Precision("32", "32"), cuda=False)
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
    def make_step() -> TrainingStep:
        model = Joined(join)
        return TrainingStep(
            model=model,
            loss=DiceCE(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            inference=SlidingWindow([8, 8, 8]),
            patch_size=[8, 8, 8],
            volume_size=[8, 8, 8],
            batch_size=2,
            channels=1,
            micro_batches=1,
            clip_norm=None,
            autocast=None,
            dtype=torch.float32,
        )

    estimated, measured = estimate(make_step), measure(make_step)
    assert estimated.peak == measured.peak
    assert estimated.sequence == measured.sequence
