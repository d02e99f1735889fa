"""Run a step on this machine's GPU and measure its memory by phase and by layer."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.machine import resolve_precision
from unet3d.memory.estimate import LayerCall
from unet3d.memory.from_config import resolve_strategy
from unet3d.memory.step.config import StepConfig
from unet3d.memory.step.training_step import NullListener, TrainingStep, make_step_factory
from unet3d.memory.trace import hook_modules
from unet3d.peak_memory import MemoryRecord, PeakMeter


@dataclass(frozen=True)
class Measurement:
    """What a step took, by phase and by layer."""

    phases: dict[str, MemoryRecord]
    layers: list[LayerCall]

    @property
    def peak(self) -> MemoryRecord:
        """Return the peak of the whole step."""
        return reduce(or_, self.phases.values())


def measure_step(config: StepConfig) -> Measurement:
    """Run the configured step on this machine's GPU."""
    device = torch.device("cuda")
    precision = resolve_precision(config.precision, "cuda")
    config = resolve_strategy(config, precision, cuda=True)
    step = make_step_factory(config, precision, cuda=True, device="cuda")()
    phases = measure_phases(step, device)

    def read() -> tuple[int, int]:  # slow, so in a step of its own
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)

    with record_layers(step.model, read) as layers:
        step.train(NullListener())
    return Measurement(phases=phases, layers=layers)


def measure_phases(step: TrainingStep, device: torch.device) -> dict[str, MemoryRecord]:
    """Return the peak of each phase of the second step, which is the one that is estimated."""
    step.train(NullListener())
    phases = PhaseMeter(device)
    step.train(phases)
    phases.begin_phase("end")
    return phases.peaks


class PhaseMeter(NullListener):
    """Read the peak of each phase."""

    def __init__(self, device: torch.device):
        self.device, self.meter = device, PeakMeter()
        self.peaks: dict[str, MemoryRecord] = {}
        self.phase: str | None = None

    def begin_phase(self, phase: str) -> None:
        """End the current phase and begin another."""
        if self.phase is not None:
            record = self.meter.read(self.device)
            self.peaks[self.phase] = record | self.peaks.get(self.phase, record)
        self.phase = phase
        self.meter.start(self.device)


@contextmanager
def record_layers(
    model: nn.Module, read: Callable[[], tuple[int, int]]
) -> Generator[list[LayerCall]]:
    """Record each leaf module that runs in the body, in forward and backward.

    `read` returns the bytes that are allocated and reserved.
    """
    layers: list[LayerCall] = []
    starts: list[int] = []  # bytes allocated as the open calls began

    def add(path: str, kind: str, phase: str, start: int) -> None:
        allocated, reserved = read()
        layers.append(LayerCall(path, kind, phase, allocated, allocated - start, reserved))

    def after(path: str, kind: str, output: Any, is_leaf: bool) -> None:
        start = starts.pop()
        if is_leaf:
            add(path, kind, "forward", start)
            tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            for node in dict.fromkeys(t.grad_fn for t in tensors if t.grad_fn is not None):
                watch(node, path, kind)

    def watch(node: Any, path: str, kind: str) -> None:
        """Hook the autograd node: backward hooks on modules forbid in-place operations."""
        before: list[int] = []
        node.register_prehook(lambda grads: before.append(read()[0]))
        node.register_hook(lambda outputs, grads: add(path, kind, "backward", before.pop()))

    with hook_modules(model, lambda path: starts.append(read()[0]), after):
        yield layers
