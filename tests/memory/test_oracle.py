"""The meter against real training steps on a CPU, in float32: every option that changes memory.

No difference is known. What neither side counts stands in oracle.py, with the reasons.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hydra import initialize_config_dir
from torch import Tensor, nn

from tests.memory.helpers.oracle import Memory, predicted, real
from tests.test_conf import CONF, SHRUNK
from unet3d.config.compose import compose_initialized
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.loss.dice_ce import DiceCE
from unet3d.machine.device import Precision
from unet3d.workflows.memory.training_step import TrainingStep, make_step_factory

Join = Callable[[Tensor, Tensor, Tensor], Tensor]

SMALL = ("data.patch_size=[16,16,16]", "data.batch_size=2")
NARROW = ("model.width=4",)
ODD = ("data.patch_size=[18,17,13]", "model.norm=batch")


def options(group: str) -> list[str]:
    return [file.stem for file in sorted((CONF / group).glob("[!_]*.yaml"))]


def takes(model: str, kept: str) -> bool:
    """MONAI's network does not tell its blocks; the forum's has none that are lean."""
    lean = model.startswith("unet_") and kept == "leanest"
    return kept == "none" or lean or (kept == "blocks" and model != "dynunet")


STRATEGIES = [option for option in options("checkpointing") if option != "auto"]
EVERY_OPTION = [
    *(
        (f"model={model}", f"checkpointing={kept}", *SHRUNK.get(model, NARROW))
        for model in options("model")
        for kept in STRATEGIES
        if takes(model, kept)
    ),
    *(
        (f"pool={pool}", f"checkpointing={kept}", "model.norm=batch", *NARROW)
        for pool in options("pool")
        for kept in (STRATEGIES if pool == "max" else ("none", "leanest"))
    ),
    *(
        (f"optimizer={optimizer}", f"model.norm={norm}", *NARROW)
        for optimizer in options("optimizer")
        for norm in ("batch", "instance")
    ),
]
BESIDES = [
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
]
RESIDUAL = (*SHRUNK["dynunet"], "model=dynunet", "+model.res_block=true")
CASES = [*EVERY_OPTION, *((*NARROW, *words) for words in BESIDES), RESIDUAL]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def compared(request: pytest.FixtureRequest) -> tuple[Memory, Memory]:
    """What the meter says of a case, and what is true."""
    torch.set_num_threads(1)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        asked = compose_initialized([*SMALL, *request.param], "train")
    make_step = make_step_factory(asked, Precision("32", "32"), cuda=False)
    return predicted(make_step), real(make_step)


def test_the_predicted_peak_is_the_real_one_to_the_byte(compared):
    meter, truth = compared
    assert meter.peak == truth.peak


def test_memory_is_taken_and_given_back_in_the_predicted_order(compared):
    meter, truth = compared
    assert meter.before == truth.before
    assert meter.sequence == truth.sequence


class Joined(nn.Module):
    """Two convolutions and a way to join what they give: gradients meet at their input."""

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
def test_gradients_that_meet_take_what_autograd_takes(join):
    def make_step() -> TrainingStep:
        model = Joined(join)
        return TrainingStep(
            model=model,
            loss=DiceCE(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            infer=SlidingWindow([8, 8, 8]),
            patch=[8, 8, 8],
            volume=[8, 8, 8],
            batch_size=2,
            channels=1,
            micro_batches=1,
            clip=None,
            autocast=None,
            dtype=torch.float32,
        )

    meter, truth = predicted(make_step), real(make_step)
    assert meter.peak == truth.peak
    assert meter.sequence == truth.sequence
