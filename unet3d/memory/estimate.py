"""Estimate the memory of a training step before it runs: peaks by phase, kind and layer."""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.errors import UsageError, summarize_error
from unet3d.memory.allocator import Replay, replay
from unet3d.memory.autocast import use_cuda_autocast_rules
from unet3d.memory.cuda_libraries import COLUMNS
from unet3d.memory.trace import Block, EventRange, Trace
from unet3d.peak_memory import MemoryRecord
from unet3d.simulated_cuda import simulate_cuda
from unet3d.types import has_blocks

STEPS = 2
"""The first step allocates the optimizer's state and gradients; the second is like all others."""

KINDS = (
    *("parameters", "gradients", "optimizer state", "averaged weights", "saved activations"),
    *("recomputed", "activation gradients", "temporaries", "workspaces", "loss", "input"),
)


class Step(Protocol):
    """A training step to run on fake tensors."""

    model: nn.Module

    @property
    def repeats(self) -> bool:
        """Return whether all steps are like the first, but for what the first one keeps."""
        ...

    def train(self, trace: Trace) -> None:
        """Run an optimizer step with all its micro-batches, and set the phases of the trace."""
        ...

    def validate(self, trace: Trace) -> None:
        """Run validation on one case."""
        ...


@dataclass(frozen=True)
class Layer:
    """One call of a module: bytes allocated after it, their change, and bytes reserved."""

    name: str
    type: str
    phase: str
    allocated: int
    change: int
    reserved: int


class MemoryEstimate:
    """The memory of a traced step; all sizes are in bytes."""

    def __init__(self, trace: Trace, *, parameters: int, levels: dict[str, int]):
        self.trace = trace
        self.parameters = parameters  # number of trainable parameters
        self._levels = levels  # by module path

    @cached_property
    def sizes(self) -> np.ndarray:
        """Return the size of every block: on CUDA, what the caching allocator gives for it."""
        exact = [block.nbytes for block in self.trace.blocks]
        return np.array(self._replay.block_sizes if self.trace.cuda else exact, np.int64)

    @cached_property
    def _replay(self) -> Replay:
        return self._replay_sizes([block.nbytes for block in self.trace.blocks])

    def _replay_sizes(self, sizes: Sequence[int]) -> Replay:
        return replay(self.trace.events, sizes, self.trace.graph_pool)

    @cached_property
    def curve(self) -> np.ndarray:
        """Return the bytes allocated after each event."""
        return self._accumulate(self.sizes)

    @cached_property
    def reserved_curve(self) -> np.ndarray:
        """Return the bytes that the caching allocator has reserved after each event."""
        return np.array(self._replay.reserved, np.int64)

    @cached_property
    def steady_step(self) -> tuple[int, int]:
        """Return (start, stop) of the last training step's events."""
        steps = [p for p in self.trace.phases if p.phase in ("forward", "backward", "optimizer")]
        last = max(n for n, p in enumerate(steps) if p.phase == "optimizer")
        previous = max((n for n in range(last) if steps[n].phase == "optimizer"), default=-1)
        return steps[previous + 1].start, steps[last].stop

    @cached_property
    def peak_event(self) -> int:
        """Return the event of the steady step's peak."""
        start, stop = self.steady_step
        return start + int(self.curve[start:stop].argmax())

    @property
    def peak(self) -> MemoryRecord:
        """Return the peaks of the steady step."""
        return self._record(*self.steady_step)

    @property
    def phases(self) -> dict[str, MemoryRecord]:
        """Return the peaks of the steady step's phases, and of validation."""
        start, stop = self.steady_step
        records: dict[str, MemoryRecord] = {}
        for span in self.trace.phases:
            inside = start <= span.start and span.stop <= stop
            if span.stop > span.start and (inside or span.phase == "validation"):
                record = self._record(span.start, span.stop)
                records[span.phase] = record | records.get(span.phase, record)
        return records

    @property
    def without_workspaces(self) -> int:
        """Return the peak as it would be without the workspaces of libraries."""
        start, stop = self.steady_step
        blocks = self.trace.blocks
        sizes = [0 if block.kind == "workspaces" else block.nbytes for block in blocks]
        if not self.trace.cuda:
            return int(self._accumulate(sizes)[start:stop].max())
        return max(self._replay_sizes(sizes).allocated[start:stop])

    def _accumulate(self, sizes: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the bytes allocated after each event, for these sizes of the blocks."""
        events = np.array(self.trace.events, np.int64)
        return np.cumsum(np.sign(events) * np.asarray(sizes)[np.abs(events) - 1])

    @property
    def column_bytes(self) -> int:
        """Return the largest columns of a convolution without cuDNN; 0 if all use it."""
        return max((b.nbytes for b in self.trace.blocks if b.op == COLUMNS), default=0)

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Return the bytes in use at the peak, by kind."""
        nbytes: Counter[str] = Counter()
        for block in self.find_live_blocks(self.peak_event):
            nbytes[self.get_kind(block)] += int(self.sizes[block.id])
        return {kind: nbytes[kind] for kind in KINDS if nbytes[kind]}

    @property
    def layers(self) -> list[Layer]:
        """Return one row per call of a leaf module in the steady step, in order."""
        start, stop = self.steady_step
        return [self._layer(c) for c in self.trace.calls if start <= c.start and c.stop <= stop]

    def find_live_blocks(self, event: int) -> list[Block]:
        """Return the blocks that are allocated after an event."""
        return [
            b
            for b in self.trace.blocks
            if b.allocated_at <= event and (b.freed_at is None or b.freed_at > event)
        ]

    def get_kind(self, block: Block) -> str:
        """Return the kind of a block, by its phase, its module and its lifetime."""
        if block.kind is not None:
            return block.kind
        if block.phase == "recompute":
            return "recomputed"
        if block.phase == "backward":
            return "activation gradients"
        if block.phase == "forward":
            end = next(p.stop for p in self.trace.phases if p.stop > block.allocated_at)
            if not block.path:
                return "loss"
            freed = block.freed_at is not None and block.freed_at < end
            return "temporaries" if freed else "saved activations"
        return "temporaries"

    @property
    def levels(self) -> dict[int, int]:
        """Return the bytes of activations at the peak, by level; 0 is full resolution."""
        nbytes: Counter[int] = Counter()
        for block in self.find_live_blocks(self.peak_event):
            if self.get_kind(block) in ("saved activations", "recomputed", "activation gradients"):
                for path, level in self._levels.items():
                    if block.path == path or block.path.startswith(f"{path}."):
                        nbytes[level] += int(self.sizes[block.id])
        return dict(sorted(nbytes.items()))

    def group_by_module(self, event: int) -> dict[str, int]:
        """Return the bytes in use after an event, by module, the largest first."""
        nbytes: Counter[str] = Counter()
        for block in self.find_live_blocks(event):
            nbytes[block.path or self.get_kind(block)] += int(self.sizes[block.id])
        return dict(nbytes.most_common())

    def _record(self, start: int, stop: int) -> MemoryRecord:
        start = max(0, start - 1)  # what is in use as it begins
        if not self.trace.cuda:
            return MemoryRecord(allocated=int(self.curve[start:stop].max()))
        return MemoryRecord(
            allocated=int(self.curve[start:stop].max()),
            reserved=int(self.reserved_curve[start:stop].max()),
        )

    def _layer(self, call: EventRange) -> Layer:
        before = int(self.curve[call.start - 1])
        after = int(self.curve[call.stop - 1])
        reserved = int(self.reserved_curve[call.stop - 1]) if self.trace.cuda else 0
        return Layer(call.name, call.type, call.phase, after, after - before, reserved)


class UntraceableError(UsageError):
    """The network depends on tensor values, is compiled, or cannot take this patch."""


@contextmanager
def refuse_untraceable() -> Generator[None]:
    """Raise an UntraceableError of one line instead of errors of other kinds."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # a network may do what tensors without values cannot follow
        raise UntraceableError(
            f"cannot estimate the memory of this network's step: {summarize_error(error)}"
        ) from error


@contextmanager
def simulate_cuda_step() -> Generator[None]:
    """Run a step on fake CPU tensors with the dtypes and operators that it has on CUDA."""
    with simulate_cuda(), use_cuda_autocast_rules():
        yield


def estimate_step(
    make_step: Callable[[], Step], *, cuda: bool, validates: bool = True
) -> MemoryEstimate:
    """Run a step on fake tensors and estimate its memory, and by default that of validation."""
    with FakeTensorMode(), simulate_cuda_step() if cuda else nullcontext():
        step = make_step()
        trace = Trace(cuda=cuda)
        with trace.record(step.model):
            start = len(trace.events)
            step.train(trace)
            for _ in range(1, STEPS):
                if step.repeats:
                    trace.repeat(start)
                else:
                    step.train(trace)
            if validates:
                step.validate(trace)
            trace.begin_phase("end")
        model = step.model
        parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        paths = {module: path for path, module in model.named_modules()}
        blocks = model.blocks() if has_blocks(model) else ()
        levels = {paths[module]: level for level, module in blocks}
    return MemoryEstimate(trace, parameters=parameters, levels=levels)
