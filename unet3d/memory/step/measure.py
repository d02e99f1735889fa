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

from unet3d.errors import UsageError
from unet3d.machine import resolve_precision
from unet3d.memory.estimate import Layer
from unet3d.memory.step.config import StepConfig
from unet3d.memory.step.training_step import NullListener, TrainingStep, make_step_factory
from unet3d.memory.strategies import resolve_strategy
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

    @contextmanager
    def record(self, model: nn.Module) -> Generator["LayerRecorder"]:
        """Record the model's leaf modules while the body runs."""
        self._paths = {module: path for path, module in model.named_modules()}
        handles = [  # for all modules: a hook of one of them would switch fused blocks off
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
        ]
        self._before: list[tuple[int, int]] = []
        self._num_calls = 0
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module in self._paths:
            self._num_calls += 1
            self._before.append((self.read()[0], self._num_calls))

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module not in self._paths:
            return
        before, call = self._before.pop()
        if call != self._num_calls:
            return
        path, kind = self._paths[module], type(module).__name__
        self._add(path, kind, "forward", before)
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        for node in dict.fromkeys(t.grad_fn for t in tensors if t.grad_fn is not None):
            self._watch(node, path, kind)

    def _watch(self, node: Any, path: str, kind: str) -> None:
        """Hook the autograd node: backward hooks on modules forbid in-place operations."""
        before: list[int] = []
        node.register_prehook(lambda grads: before.append(self.read()[0]))
        node.register_hook(lambda outputs, grads: self._add(path, kind, "backward", before.pop()))

    def _add(self, path: str, kind: str, phase: str, before: int) -> None:
        allocated, reserved = self.read()
        self.layers.append(Layer(path, kind, phase, allocated, allocated - before, reserved))


def require_gpu() -> None:
    """Refuse to measure without a GPU."""
    if not torch.cuda.is_available():
        raise UsageError("measure=true needs a GPU, and torch finds none")


def measure_phases(step: TrainingStep, device: torch.device) -> dict[str, MemoryRecord]:
    """Return the peak of each phase of the second step, which is the one that is estimated."""
    step.train(PhaseMeter(device))
    phases = PhaseMeter(device)
    step.train(phases)
    phases.begin_phase("end")
    return phases.peaks


def measure_step(config: StepConfig) -> Measurement:
    """Run the configured step on this machine's GPU."""
    require_gpu()
    device = torch.device("cuda")
    precision = resolve_precision(config.precision, "cuda")
    config = resolve_strategy(config, precision, cuda=True)
    step = make_step_factory(config, precision, cuda=True, device="cuda")()
    phases = measure_phases(step, device)
    recorder = LayerRecorder(
        lambda: (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
    )
    with recorder.record(step.model):  # slow to read, so in a step of its own
        step.train(PhaseMeter(device))
    return Measurement(phases=phases, layers=recorder.layers)
