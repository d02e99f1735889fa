"""One thing of a config swept, everything else as it is: why cost follows what it follows."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from unet3d.build.forecast import changed, forecast, scaled
from unet3d.build.measured import measured, need_gpu
from unet3d.build.request import Request, conf_folder
from unet3d.meter.predict import Prediction, predict
from unet3d.meter.record import MemoryRecord
from unet3d.meter.trace import Trace
from unet3d.types import Misuse

STUDIES = (
    "resolution",
    "batch",
    "padding",
    "kernel",
    "channels",
    "pool",
    "precision",
    "checkpointing",
)


@dataclass(frozen=True)
class Point:
    """One value of the thing that is swept: what a step takes, or why it cannot be."""

    label: str
    found: Prediction | str
    measured: MemoryRecord | None = None  # on this machine's GPU, if that was asked for


def study(request: Request, what: str, *, measure: bool = False) -> Iterator[Point]:
    """One point for each value of the thing that is swept."""
    if measure:
        need_gpu()
    if what not in STUDIES:
        raise Misuse(f"study must be one of {', '.join(STUDIES)}, got {what!r}")
    cuda = str(request.config.trainer.accelerator) != "cpu"
    for override in values(request, what):
        try:
            trial = changed(request, override)
            real = measured(trial).peak if measure else None
            yield Point(override, forecast(trial), real)
        except Misuse as reason:
            yield Point(override, str(reason))
    if what in ("kernel", "padding"):
        for size in (16, 32):
            for kernel, padding in ((1, 0), (3, 0), (3, 1), (5, 0), (5, 2)):
                label = f"Conv3d(16, 32, {kernel}, padding={padding}) at {size}^3"
                made = predict(partial(OneConv, kernel, padding, size), cuda=cuda)
                yield Point(label, made)


def values(request: Request, what: str) -> list[str]:
    """The overrides that a study tries."""
    cfg = request.config
    if what == "resolution":
        shares = (0.25, 0.5, 0.75, 1.0, 1.25)
        return [f"data.patch_size={scaled(cfg.data.patch_size, share)}" for share in shares]
    if what == "batch":
        return [f"data.batch_size={n}" for n in (1, 2, 3, 4, 6, 8)]
    if what == "kernel":
        return [f"model.kernel={k}" for k in (1, 3, 5)] if "kernel" in cfg.model else []
    if what == "channels":
        width = cfg.model.get("width")
        if width is None:
            raise Misuse("study=channels needs a network with model.width")
        return [f"model.width={max(1, int(width * s))}" for s in (0.25, 0.5, 1, 1.5, 2)]
    if what == "precision":
        return [f"precision={p}" for p in ("32", "16", "bf16", "16-true", "bf16-true")]
    if what in ("pool", "checkpointing"):
        options = sorted(p.stem for p in (conf_folder() / what).glob("[!_]*.yaml"))
        return [f"{what}={option}" for option in options]
    return []  # padding: the networks keep their size; it is studied on one convolution


class OneConv:
    """A training step of a single convolution, without an optimizer."""

    def __init__(self, kernel: int, padding: int, size: int):
        self.model = nn.Conv3d(16, 32, kernel, padding=padding)
        self.size = size

    def train(self, trace: Trace) -> None:
        """Forward and backward of two volumes."""
        trace.enter("forward")
        x = torch.empty(2, 16, self.size, self.size, self.size, requires_grad=True)
        trace.name(x, "input")
        y = self.model(x)
        gradient = torch.empty_like(y)
        trace.name(gradient, "activation gradients")
        trace.enter("backward")
        y.backward(gradient)
        trace.enter("optimizer")
        self.model.zero_grad()

    def validate(self, trace: Trace) -> None:
        """There is nothing to validate."""
