"""Compare a step of ResNet-50 with the events that a real GPU recorded (hta_resnet50.json.gz)."""

from dataclasses import dataclass
from typing import Any

import torch
from monai.networks.nets.resnet import ResNet
from torch import nn

from unet3d.memory.trace import Trace

UNKNOWN = 7
"""Category of workspaces."""


class ResNetStep:
    """The step that was recorded: batch 32, SGD with momentum, one batch for all steps."""

    repeats = False  # replaces the outputs of the step before

    def __init__(self):
        self.model = ResNet(
            *("bottleneck", [3, 4, 6, 3], [64, 128, 256, 512]),
            spatial_dims=2,
            n_input_channels=3,
            conv1_t_stride=2,
            bias_downsample=False,
            num_classes=1000,
        )
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, momentum=0.9, foreach=True
        )
        self.batch, self.outputs = None, None

    def train(self, trace: Trace) -> None:
        trace.begin_phase("forward")
        if self.batch is None:
            self.batch = torch.empty(32, 3, 224, 224), torch.empty(32, 1000)
            trace.label(self.batch, "input")
        images, targets = self.batch
        self.optimizer.zero_grad()
        self.outputs = self.model(images)  # of the previous step until then
        loss = nn.functional.cross_entropy(self.outputs, targets)
        trace.begin_phase("backward")
        loss.backward()
        del loss
        trace.begin_phase("optimizer")
        self.optimizer.step()

    def validate(self, trace: Trace) -> None:
        pass


@dataclass(frozen=True)
class RecordedStep:
    """The second recorded step, in bytes: positive where allocated, negative where freed."""

    start: int  # bytes in use as it begins
    all: list[int]
    without_workspaces: list[int]


def read_step(recording: dict[str, Any]) -> RecordedStep:
    """Return a recorded step; a workspace is freed by the event after its allocation."""
    first, last = recording["step_starts"][1:3]
    sizes, categories = recording["events"][first:last], recording["category"][first:last]
    workspaces = {
        n
        for i in range(len(sizes) - 1)
        if sizes[i] > 0 and sizes[i] == -sizes[i + 1] and categories[i] == UNKNOWN
        for n in (i, i + 1)
    }
    start = sum(recording["preexisting"]) + sum(recording["events"][:first])
    return RecordedStep(start, sizes, [s for n, s in enumerate(sizes) if n not in workspaces])
