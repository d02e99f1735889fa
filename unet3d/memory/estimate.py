"""What a training step costs, before it runs: peaks by phase, by kind and by layer."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.memory.allocator import replay, round_block_size
from unet3d.memory.autocast import cuda_autocast_rules
from unet3d.memory.record import MemoryRecord
from unet3d.memory.trace import Block, Span, Trace
from unet3d.types import HasBlocks

STEPS = 2
"""The first step makes the optimizer's state and finds no gradients; the second is as the rest."""

KINDS = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations kept",
    "recomputed",
    "activation gradients",
    "temporaries",
    "loss",
    "input",
)


class Step(Protocol):
    """A training step on tensors without memory, as `build` makes it."""

    model: nn.Module

    def train(self, trace: Trace) -> None:
        """One optimizer step with all its micro-batches; tells the trace its phases."""
        ...

    def validate(self, trace: Trace) -> None:
        """One validation case."""
        ...


@dataclass(frozen=True)
class Layer:
    """One call of a module: what was allocated after it, what it changed, what was reserved."""

    name: str
    type: str
    phase: str
    allocated: int
    change: int
    reserved: int


class MemoryEstimate:
    """Pure arithmetic on the events of a trace. All sizes are in bytes."""

    def __init__(self, trace: Trace, *, parameters: int, levels: dict[str, int]):
        self.trace = trace
        self.parameters = parameters  # how many numbers are trained
        self._levels = levels  # of the network, by module path

    @cached_property
    def sizes(self) -> np.ndarray:
        """Of every block, as the device's allocator counts it."""
        exact = [block.nbytes for block in self.trace.blocks]
        return np.array(
            [round_block_size(n) if n and self.trace.cuda else n for n in exact], np.int64
        )

    @cached_property
    def curve(self) -> np.ndarray:
        """Bytes allocated after each event."""
        events = np.array(self.trace.events, np.int64)
        return np.cumsum(np.sign(events) * self.sizes[np.abs(events) - 1])

    @cached_property
    def reserved_curve(self) -> np.ndarray:
        """Bytes reserved by the caching allocator after each event."""
        exact = [block.nbytes for block in self.trace.blocks]
        return np.array(replay(self.trace.events, exact)[1], np.int64)

    @cached_property
    def steady(self) -> tuple[int, int]:
        """The events of the last training step: from, to."""
        steps = [p for p in self.trace.phases if p.phase in ("forward", "backward", "optimizer")]
        last = max(n for n, p in enumerate(steps) if p.phase == "optimizer")
        begun = max((n for n in range(last) if steps[n].phase == "optimizer"), default=-1)
        return steps[begun + 1].begun, steps[last].ended

    @cached_property
    def peak_at(self) -> int:
        """The event of the steady step's peak."""
        begun, ended = self.steady
        return begun + int(self.curve[begun:ended].argmax())

    @property
    def peak(self) -> MemoryRecord:
        """Of a steady step."""
        return self._record(*self.steady)

    @property
    def phases(self) -> dict[str, MemoryRecord]:
        """Peaks of the steady step's phases, and of validation."""
        begun, ended = self.steady
        found: dict[str, MemoryRecord] = {}
        for mark in self.trace.phases:
            inside = begun <= mark.begun and mark.ended <= ended
            if mark.ended > mark.begun and (inside or mark.phase == "validation"):
                record = self._record(mark.begun, mark.ended)
                found[mark.phase] = record | found.get(mark.phase, record)
        return found

    @property
    def interval(self) -> tuple[int, int]:
        """The least and the most that `allocated` may be: cuDNN's workspace cannot be seen."""
        begun, ended = self.steady
        least = int(self.curve[self.peak_at])
        beside = [
            int(self.curve[event - 1]) + nbytes
            for event, nbytes in self.trace.workspaces
            if begun < event <= ended
        ]
        return least, max([least, *(beside if self.trace.cuda else [])])

    @property
    def kinds(self) -> dict[str, int]:
        """What is alive at the peak, by kind."""
        found: Counter[str] = Counter()
        for block in self.alive(self.peak_at):
            found[self.kind(block)] += int(self.sizes[block.id])
        return {kind: found[kind] for kind in KINDS if found[kind]}

    @property
    def layers(self) -> list[Layer]:
        """One row per call of a module in the steady step, in order."""
        begun, ended = self.steady
        return [self._layer(c) for c in self.trace.calls if begun <= c.begun and c.ended <= ended]

    def alive(self, event: int) -> list[Block]:
        """The blocks that are allocated after an event."""
        return [
            b for b in self.trace.blocks if b.born <= event and (b.died is None or b.died > event)
        ]

    def kind(self, block: Block) -> str:
        """What a block is, by where it was made and how long it lived."""
        if block.kind is not None:
            return block.kind
        if block.phase == "recompute":
            return "recomputed"
        if block.phase == "backward":
            return "activation gradients"
        if block.phase == "forward":
            end = next(p.ended for p in self.trace.phases if p.ended > block.born)
            if not block.path:
                return "loss"
            return (
                "temporaries" if block.died is not None and block.died < end else "activations kept"
            )
        return "temporaries"

    @property
    def levels(self) -> dict[int, int]:
        """What the network's activations take at the peak, by level; 0 is full resolution."""
        found: Counter[int] = Counter()
        for block in self.alive(self.peak_at):
            if self.kind(block) in ("activations kept", "recomputed", "activation gradients"):
                for path, level in self._levels.items():
                    if block.path == path or block.path.startswith(f"{path}."):
                        found[level] += int(self.sizes[block.id])
        return dict(sorted(found.items()))

    def holders(self, event: int) -> dict[str, int]:
        """What is alive after an event, by the module that made it; the largest first."""
        found: Counter[str] = Counter()
        for block in self.alive(event):
            found[block.path or self.kind(block)] += int(self.sizes[block.id])
        return dict(found.most_common())

    def _record(self, begun: int, ended: int) -> MemoryRecord:
        begun = max(0, begun - 1)
        if not self.trace.cuda:
            return MemoryRecord(allocated=int(self.curve[begun:ended].max()))
        return MemoryRecord(
            allocated=int(self.curve[begun:ended].max()),
            reserved=int(self.reserved_curve[begun:ended].max()),
        )

    def _layer(self, call: Span) -> Layer:
        before = int(self.curve[call.begun - 1])
        after = int(self.curve[call.ended - 1])
        reserved = int(self.reserved_curve[call.ended - 1]) if self.trace.cuda else 0
        return Layer(call.name, call.type, call.phase, after, after - before, reserved)


def estimate_step(make_step: Callable[[], Step], *, cuda: bool) -> MemoryEstimate:
    """Run a step on tensors without memory and say what it would take."""
    with FakeTensorMode(), cuda_autocast_rules() if cuda else nullcontext():
        step = make_step()
        trace = Trace(cuda=cuda)
        with trace.record(step.model):
            for _ in range(STEPS):
                step.train(trace)
            step.validate(trace)
            trace.begin_phase("end")
        model = step.model
        parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        paths = {module: path for path, module in model.named_modules()}
        blocks = model.blocks() if isinstance(model, HasBlocks) else ()
        levels = {paths[module]: level for level, module in blocks}
    return MemoryEstimate(trace, parameters=parameters, levels=levels)
