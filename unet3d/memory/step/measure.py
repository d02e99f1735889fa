"""Run a step on this machine's GPU and measure its memory by phase and by layer."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from unet3d.machine import resolve_precision
from unet3d.memory.estimate import Layer
from unet3d.memory.from_config import resolve_strategy
from unet3d.memory.step.config import StepConfig
from unet3d.memory.step.training_step import NullListener, TrainingStep, make_step_factory
from unet3d.peak_memory import MemoryRecord, PeakMeter


@dataclass(frozen=True)
class Measurement:
    """What a step took, by phase and by layer."""

    phases: dict[str, MemoryRecord]
    layers: list[Layer]

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
    recorder = LayerRecorder(
        lambda: (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
    )
    with recorder.record(step.model):  # slow to read, so in a step of its own
        step.train(NullListener())
    return Measurement(phases=phases, layers=recorder.layers)


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


class LayerRecorder:
    """Reads the device's memory before and after each leaf module, in forward and backward."""

    def __init__(self, read: Callable[[], tuple[int, int]]):
        self.read = read  # returns the bytes allocated and reserved
        self.layers: list[Layer] = []
        self._calls: list[tuple[int, int]] = []  # that are open: bytes before, and a number
        self._num_calls = 0

    @contextmanager
    def record(self, model: nn.Module) -> Generator["LayerRecorder"]:
        """Record the model's leaf modules while the body runs."""
        self._paths = {module: path for path, module in model.named_modules()}
        handles = [  # for all modules: a hook of one of them would switch fused blocks off
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module in self._paths:
            self._num_calls += 1
            self._calls.append((self.read()[0], self._num_calls))

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module not in self._paths:
            return
        before, call = self._calls.pop()
        if call == self._num_calls:  # it called no other module
            self._add(module, "forward", before)
            tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            for node in dict.fromkeys(t.grad_fn for t in tensors if t.grad_fn is not None):
                self._watch(node, module)

    def _watch(self, node: Any, module: nn.Module) -> None:
        """Hook the autograd node: backward hooks on modules forbid in-place operations."""
        before: list[int] = []
        node.register_prehook(lambda grads: before.append(self.read()[0]))
        node.register_hook(lambda outputs, grads: self._add(module, "backward", before.pop()))

    def _add(self, module: nn.Module, phase: str, before: int) -> None:
        (allocated, reserved), kind = self.read(), type(module).__name__
        change = allocated - before
        self.layers.append(Layer(self._paths[module], kind, phase, allocated, change, reserved))
