"""Estimate the memory of a training step before it runs: peaks by phase, kind, layer and batch."""

import re
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from unet3d.errors import UsageError, summarize_error
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory.allocator import Replay, replay
from unet3d.memory.cuda_libraries import COLUMNS, PARTIAL_SUMS
from unet3d.memory.events import Block
from unet3d.memory.fake_tensors import OURS, TORCH, simulate_cuda_step, use_fake_tensors
from unet3d.memory.trace import Trace
from unet3d.model.weights import count_parameters
from unet3d.peak_memory import MemoryRecord
from unet3d.text import join_first
from unet3d.types import has_blocks

KINDS = (
    *("parameters", "gradients", "optimizer state", "averaged weights", "saved activations"),
    *("recomputed", "activation gradients", "temporaries", "workspaces", "loss", "input"),
)

STEP_PHASES = ("step", "forward", "backward", "optimizer")

ACTIVATIONS = ("saved activations", "recomputed", "activation gradients")


class Step(Protocol):
    """A training step to run on fake tensors; subclasses have its defaults."""

    model: nn.Module

    def train(self, trace: Trace) -> None:
        """Run an optimizer step with all its micro-batches, and set the phases of the trace."""
        ...

    def validate(self, trace: Trace) -> None:
        """Run validation on one case, if there is one."""
        return


@dataclass(frozen=True)
class LayerCall:
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
        self.notes: list[str] = []  # on what is not estimated as it runs
        self.parameters = parameters  # number of trainable parameters
        self._levels = levels  # by module path
        replayed = self._replay([block.nbytes for block in trace.blocks])
        self.sizes = np.array(replayed.block_sizes, np.int64)  # on CUDA, those of the allocator
        self.curve = np.array(replayed.allocated, np.int64)  # after each event
        self.reserved_curve = np.array(replayed.reserved, np.int64)

    def _replay(self, sizes: Sequence[int]) -> Replay:
        """Allocate blocks of these sizes; on a CPU, exactly these, and nothing is reserved."""
        events = self.trace.events
        if self.trace.cuda:
            return replay(events, sizes, self.trace.graph_pool)
        changes = np.sign(events) * np.array(sizes, np.int64)[np.abs(events) - 1]
        return Replay(np.cumsum(changes).tolist(), [0] * len(events), list(sizes))

    @cached_property
    def steady_step(self) -> tuple[int, int]:
        """Return (start, stop) of the last training step's events."""
        start = max(p.start for p in self.trace.phases if p.phase == "step")
        return start, max(p.stop for p in self.trace.phases if p.phase in STEP_PHASES)

    @cached_property
    def peak_event(self) -> int:
        """Return the event of the steady step's peak."""
        start, stop = self.steady_step
        return start + int(self.curve[start:stop].argmax())

    @cached_property
    def peak(self) -> MemoryRecord:
        """Return the peaks of the steady step."""
        return self._find_peak(*self.steady_step)

    @cached_property
    def run_span(self) -> tuple[int, int]:
        """Return (start, stop) of the events of the steady step and of validation after it."""
        start, stop = self.steady_step
        ends = [p.stop for p in self.trace.phases if p.phase == "validation"]
        return start, max([stop, *ends])

    @cached_property
    def run_peak(self) -> MemoryRecord:
        """Return the peaks of a run: of the steady step, or of validation if that needs more."""
        return self._find_peak(*self.run_span)

    def _find_peak(self, start: int, stop: int) -> MemoryRecord:
        record = self._record(start, stop)
        if not self.trace.cuda:
            return record
        nbytes = np.array([block.nbytes for block in self.trace.blocks], np.int64)
        at_most = find_most_reserved(
            record.reserved or 0,
            lambda sums: self._replay((nbytes + sums).tolist()).reserved[start:stop],
            self.trace,
        )
        return replace(record, reserved_at_most=at_most)

    @property
    def allocated(self) -> int:
        """Return the largest size of all blocks in use in the steady step."""
        return self.peak.allocated or 0

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
        blocks = self.trace.blocks
        sizes = [0 if block.kind == "workspaces" else block.nbytes for block in blocks]
        return max(self._replay(sizes).allocated[slice(*self.steady_step)])

    @property
    def column_bytes(self) -> int:
        """Return the largest columns of a convolution without cuDNN; 0 if all use it."""
        return max((b.nbytes for b in self.trace.blocks if b.op == COLUMNS), default=0)

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Return the bytes in use at the peak, by kind."""
        nbytes = self._group_peak(self.get_kind)
        return {kind: nbytes[kind] for kind in KINDS if nbytes[kind]}

    @property
    def modules(self) -> dict[str, int]:
        """Return the bytes in use at the peak, by module, the largest first."""
        return dict(self._group_peak(lambda b: b.path or self.get_kind(b)).most_common())

    @property
    def levels(self) -> dict[int, int]:
        """Return the bytes of activations at the peak, by level; 0 is full resolution."""
        nbytes = self._group_peak(
            lambda b: self.get_level(b.path) if self.get_kind(b) in ACTIVATIONS else None
        )
        nbytes.pop(None, None)
        return dict(sorted(nbytes.items()))

    @property
    def layers(self) -> list[LayerCall]:
        """Return one row per call of a leaf module in the steady step, in order."""
        layers, (start, stop) = [], self.steady_step
        for call in self.trace.calls:
            if start <= call.start and call.stop <= stop:
                before, after = (int(self.curve[event - 1]) for event in (call.start, call.stop))
                sizes = after, after - before, int(self.reserved_curve[call.stop - 1])
                layers.append(LayerCall(call.name, call.type, call.phase, *sizes))
        return layers

    def _group_peak(self, get_group: Callable[[Block], Any]) -> Counter[Any]:
        """Return the bytes of the blocks that are in use at the peak, by their group."""
        nbytes: Counter[Any] = Counter()
        for block in self.trace.blocks:
            end = len(self.trace.events) if block.freed_at is None else block.freed_at
            if block.allocated_at <= self.peak_event < end:
                nbytes[get_group(block)] += int(self.sizes[block.id])
        return nbytes

    def get_kind(self, block: Block) -> str:
        """Return the kind of a block, by its phase, its module and its lifetime."""
        if block.kind is not None:
            return block.kind
        if block.phase != "forward":
            kinds = {"recompute": "recomputed", "backward": "activation gradients"}
            return kinds.get(block.phase, "temporaries")
        if not block.path:
            return "loss"
        end = next(p.stop for p in self.trace.phases if p.stop > block.allocated_at)
        freed = block.freed_at is not None and block.freed_at < end
        return "temporaries" if freed else "saved activations"

    def get_level(self, path: str) -> int | None:
        """Return the level of a module; None: it is not part of a level's block."""
        levels = self._levels.items()
        return next((n for block, n in levels if f"{path}.".startswith(f"{block}.")), None)

    def _record(self, start: int, stop: int) -> MemoryRecord:
        span = slice(max(0, start - 1), stop)  # with what is in use as it begins
        reserved = int(self.reserved_curve[span].max()) if self.trace.cuda else None
        return MemoryRecord(allocated=int(self.curve[span].max()), reserved=reserved)


def find_most_reserved(
    reserved: int, replay_with: Callable[[np.ndarray], Sequence[int]], trace: Trace
) -> int:
    """Return the most that is reserved if cuDNN takes memory for partial sums.

    A few MiB more may move a large block to a segment of its own.
    """
    weights = np.zeros(len(trace.blocks), np.int64)
    weights[list(trace.weights)] = [4 * numel for numel in trace.weights.values()]
    for times, most in PARTIAL_SUMS if weights.any() else ():
        reserved = max(reserved, *replay_with(np.minimum(times * weights, most)))
    return reserved


def get_device_bytes(estimate: MemoryEstimate) -> int:
    """Return what a run takes of the device; on a CPU no caching allocator reserves more."""
    return estimate.run_peak.reserved or estimate.run_peak.allocated or 0


def add_context_bytes(peak: MemoryRecord) -> int:
    """Return what a process takes of the device at most, with 600 MiB for the CUDA context."""
    return (peak.reserved_at_most or peak.reserved or peak.allocated or 0) + CUDA_CONTEXT_BYTES


class UntraceableError(UsageError):
    """The network depends on tensor values, is compiled, or cannot take this patch."""


def trace_step(
    make_step: Callable[[], Step], *, cuda: bool, validates: bool = True
) -> MemoryEstimate:
    """Run a step on fake tensors and estimate its memory, and by default that of validation."""
    trace = Trace(cuda=cuda)
    try:
        with use_fake_tensors(), simulate_cuda_step() if cuda else nullcontext():
            step = make_step()
            model = step.model
            with trace.record(model):
                for _ in range(2):  # the first allocates optimizer state; later ones are alike
                    trace.begin_phase("step")
                    step.train(trace)
                if validates:
                    step.validate(trace)
                trace.begin_phase("end")
            if trace.obstacle is not None:  # and the script has gone on without what it prevented
                raise trace.obstacle
    except UsageError:
        raise
    except Exception as error:  # a network may do what tensors without values cannot follow
        raise UntraceableError(
            f"cannot estimate the memory of this network's step: {describe_obstacle(error)}"
            + "".join(f"; {note}" for note in describe_reads(trace))
        ) from error
    paths = {module: path for path, module in model.named_modules()}
    blocks = model.blocks() if has_blocks(model) else ()
    levels = {paths[module]: level for level, module in blocks}
    estimate = MemoryEstimate(trace, parameters=count_parameters(model), levels=levels)
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        estimate.notes.append("what recurrent layers keep for backward is not estimated")
    estimate.notes += [f"the gradient of {n} is estimated {how}" for n, how in trace.formulas]
    estimate.notes += describe_reads(trace)
    return estimate


def describe_reads(trace: Trace) -> list[str]:
    """Say where a step reads values on which sizes and branches may depend, if it does."""
    note = "numbers and conditions are 0 and False in an estimate, which may change what runs"
    return [f"{note}: they are read at {join_first(list(trace.reads))}"] if trace.reads else []


def describe_obstacle(error: Exception) -> str:
    """Say what tensors without values cannot do, and where the code outside of torch does it."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [x.filename.removeprefix(TORCH) for x in frames]
    if isinstance(error, DynamicOutputShapeException):
        reason = (
            f"a shape depends on values ({error.func}), such as a boolean mask, nonzero or unique"
        )
    elif any(re.match(r"distributed\W|nn\Wparallel\W", file) for file in files):
        reason = (
            "it exchanges values with other processes: estimate the step of one, without "
            "DistributedDataParallel, which also keeps all gradients, or fully_shard"
        )
    elif isinstance(error, DataDependentOutputException):
        reason = f"it reads values ({error.func})"
    elif "convert all Tensors to FakeTensors" in str(error):
        reason = "it uses a tensor that was made before: make it in the build of estimate_step"
    else:
        reason = summarize_error(error)
    calls = [x for x in frames if not x.filename.startswith((TORCH, OURS))]
    return (
        f"{reason}, at {calls[-1].filename}:{calls[-1].lineno}: {calls[-1].line}"
        if calls
        else reason
    )
