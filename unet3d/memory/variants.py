"""Vary one setting of a config and keep the rest: how memory depends on it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from unet3d.config.compose import format_overrides, list_options
from unet3d.errors import UsageError
from unet3d.memory.estimate import MemoryEstimate, estimate_step
from unet3d.memory.from_config import estimate_memory, scale_patch
from unet3d.memory.step.config import StepConfig
from unet3d.memory.step.measure import measure_step, require_gpu
from unet3d.memory.trace import Trace
from unet3d.parallel import map_in_processes
from unet3d.peak_memory import MemoryRecord
from unet3d.types import PRECISIONS


@dataclass(frozen=True)
class Variant:
    """One value of the setting that varies: the estimate of its step, or why there is none."""

    label: str
    estimate: MemoryEstimate | str
    measured: MemoryRecord | None = None  # on this machine's GPU, if requested


def estimate_variants(config: StepConfig, vary: str, *, measure: bool = False) -> Iterator[Variant]:
    """Yield one variant for each value of the setting that `vary` names."""
    if measure:
        require_gpu()
    cuda = config.accelerator != "cpu"

    def estimate(value: tuple[str, Any]) -> Variant:
        changes = dict([value])
        label = format_overrides(changes)
        try:
            changed = config.vary(changes)
            measured = measure_step(changed).peak if measure else None
            return Variant(label, estimate_memory(changed), measured)
        except UsageError as reason:
            return Variant(label, str(reason))

    yield from map_in_processes(estimate, list_values(config, vary))
    if vary in ("kernel", "padding"):
        for size in (16, 32):
            for kernel_size, padding in ((1, 0), (3, 0), (3, 1), (5, 0), (5, 2)):
                label = f"Conv3d(16, 32, {kernel_size}, padding={padding}) at {size}^3"
                step = partial(SingleConvStep, kernel_size, padding, size)
                yield Variant(label, estimate_step(step, cuda=cuda))


def list_values(config: StepConfig, vary: str) -> list[tuple[str, Any]]:
    """Return the values to try, each with its key."""
    arguments = config.network.model.arguments
    if vary == "resolution":
        fractions = (0.25, 0.5, 0.75, 1.0, 1.25)
        patch_size = config.data.patch_size
        return [("data.patch_size", scale_patch(patch_size, f)) for f in fractions]
    if vary == "batch":
        return [("data.batch_size", n) for n in (1, 2, 3, 4, 6, 8)]
    if vary == "kernel":
        supported = "pool_kernel" in arguments  # networks whose kernel_size may be one number
        return [("model.kernel_size", k) for k in (1, 3, 5)] if supported else []
    if vary == "channels":
        width = arguments.get("width")
        if width is None:
            raise UsageError("vary=channels needs a network with model.width")
        return [("model.width", max(1, int(width * s))) for s in (0.25, 0.5, 1, 1.5, 2)]
    if vary == "precision":
        return [("precision", p) for p in PRECISIONS]
    if vary in ("pool", "checkpointing"):
        return [(vary, option) for option in list_options(vary)]
    return []  # padding: our networks keep their size, so only the single convolution varies


class SingleConvStep:
    """A training step of a single convolution, without an optimizer."""

    repeats = True

    def __init__(self, kernel_size: int, padding: int, size: int):
        self.model = nn.Conv3d(16, 32, kernel_size, padding=padding)
        self.size = size

    def train(self, trace: Trace) -> None:
        """Run forward and backward on two volumes."""
        trace.begin_phase("forward")
        x = torch.empty(2, 16, self.size, self.size, self.size, requires_grad=True)
        trace.label(x, "input")
        y = self.model(x)
        gradient = torch.empty_like(y)
        trace.label(gradient, "activation gradients")
        trace.begin_phase("backward")
        y.backward(gradient)
        trace.begin_phase("optimizer")
        self.model.zero_grad()

    def validate(self, trace: Trace) -> None:
        """Do nothing."""
