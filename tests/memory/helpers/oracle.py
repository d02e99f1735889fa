"""What two training steps really allocate on a CPU, and what the meter says that they will.

The real side is the very step that the meter traces, on tensors that exist, under torch's profiler,
which notes every allocation and the operations that were running. Two things are left out: what a
kernel takes and gives back before it returns, for the kernels listed here and no others (a GPU's
kernel for the same operation has other needs, which the meter does not claim to know); and what is
on the CPU wherever the network is: Python numbers, which torch wraps in tensors of their own, and
the states of the random number generator that checkpointing keeps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from unet3d.memory.estimate import STEPS, estimate_step
from unet3d.model.lean.kernels.cpu import kernels as norm_kernels
from unet3d.pool.kernels.cpu import kernels as pool_kernels
from unet3d.workflows.memory.training_step import TrainingStep

KERNELS = {
    "aten::add": "an operand in the type of the result; CUDA converts it as it reads",
    "aten::mul": "likewise",
    "aten::convolution": "oneDNN reorders input, weight and output into blocks",
    "aten::convolution_backward": "likewise",
    "aten::native_batch_norm": "partial sums of the statistics",
    "aten::native_batch_norm_backward": "a copy of the gradient",
    "aten::native_group_norm_backward": "sums over each channel",
    "aten::repeat": "the places of the copies",
    "aten::upsample_nearest3d": "the neighbours along each axis",
    "aten::upsample_trilinear3d": "the neighbours along each axis and their weights",
    "unet3d::max_pool3d": "without a C++ compiler, plain torch stands in",
    "unet3d::median_pool3d": "likewise",
    "unet3d::avg_pool3d": "likewise",
    "unet3d::avg_pool3d_backward": "likewise",
    "unet3d::approx_median_pool3d": "likewise",
    "unet3d::approx_median_pool3d_backward": "likewise",
    "unet3d::pool_spread": "likewise",
}
"""Operations that have memory for themselves while they run, and what for."""

NUMBER = 8
"""Bytes that a Python number takes at most."""
WRAPPING = (
    "aten::empty",
    "aten::empty_strided",
    "aten::scalar_tensor",
    "aten::_to_copy",
    "aten::to",
)
"""Operations by which a number comes into the type of the tensor that it meets."""
WRAPPED = ("scalar_tensor", "lift_fresh")
"""What the meter sees of the same."""

PHASE = "phase "


@dataclass(frozen=True)
class Change:
    """Bytes taken (> 0) or given back (< 0), and by whom: for those who look for a difference."""

    nbytes: int
    where: str


@dataclass(frozen=True)
class Memory:
    """All changes of the first step and of the second, which is as all that follow."""

    before: int  # bytes that are alive at first
    first: list[Change]
    second: list[Change]

    @property
    def peak(self) -> int:
        """Of the second step."""
        begun = self.before + sum(change.nbytes for change in self.first)
        return max(accumulate((change.nbytes for change in self.second), initial=begun))

    @property
    def sequence(self) -> list[int]:
        """What both steps take and give back, in order; what is taken in one go is sorted."""
        sizes = [change.nbytes for change in self.first + self.second]
        runs = groupby(sizes, key=lambda nbytes: nbytes > 0)
        return [nbytes for takes, run in runs for nbytes in (sorted(run) if takes else run)]


class Phases:
    """Stands where a trace would: leaves the phases' names in the profile."""

    def begin_phase(self, phase: str) -> None:
        with record_function(PHASE + phase):
            pass

    def label(self, tensors: Any, kind: str) -> None:
        """The profile knows no kinds."""


def predicted(make_step: Callable[[], TrainingStep]) -> Memory:
    """What the meter says."""
    prediction = estimate_step(make_step, cuda=False)
    trace = prediction.trace
    begun = next(p.begun for p in trace.phases if p.phase == "forward")
    between, ended = prediction.steady

    def changes(events: list[int]) -> list[Change]:
        blocks = [(1 if event > 0 else -1, trace.blocks[abs(event) - 1]) for event in events]
        return [
            Change(sign * block.nbytes, f"{block.phase} {block.path} {block.op}")
            for sign, block in blocks
            if block.nbytes and (block.kind or block.op not in WRAPPED)
        ]

    before = sum(change.nbytes for change in changes(trace.events[:begun]))
    return Memory(
        before, changes(trace.events[begun:between]), changes(trace.events[between:ended])
    )


def real(make_step: Callable[[], TrainingStep]) -> Memory:
    """What happens."""
    for kernels in (pool_kernels, norm_kernels):
        kernels.library(torch.float32)  # which small tensors alone would not compile
    step, phases = make_step(), Phases()
    there = [*step.model.parameters(), *step.model.buffers()]
    before = sum(t.untyped_storage().nbytes() for t in there)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for _ in range(STEPS):
            step.train(phases)  # ty: ignore[invalid-argument-type]
    results: Any = profiled.profiler.kineto_results  # ty: ignore[possibly-missing-attribute]
    nodes = sorted(walk(results.experimental_event_tree()), key=lambda node: node.start_time_ns)
    left_out = not_counted(nodes)
    steps: list[list[Change]] = []
    phase = "optimizer"
    for n, node in enumerate(nodes):
        if node.name.startswith(PHASE):
            last, phase = phase, node.name.removeprefix(PHASE)
            if (last, phase) == ("optimizer", "forward"):
                steps.append([])
        elif is_allocation(node) and n not in left_out:
            where = " < ".join(caller.name for caller in callers(node))
            steps[-1].append(Change(node.typed[1].alloc_size, where))
    first, second = steps
    return Memory(before, first, second)


def not_counted(nodes: list[Any]) -> set[int]:
    """Where memory is taken and given back that the meter does not speak of."""
    found: set[int] = set()
    held: dict[int, int] = {}  # address -> where it was taken
    for n, node in enumerate(nodes):
        if not is_allocation(node):
            continue
        address = node.typed[1].ptr
        if node.typed[1].alloc_size > 0:
            held[address] = n
        elif address not in held:
            found.add(n)  # garbage from before
        else:
            taken = held.pop(address)
            if is_python(nodes[taken], node) or in_one_kernel(nodes[taken], node):
                found |= {taken, n}
    return found


def in_one_kernel(taken: Any, given: Any) -> bool:
    """Whether one call of a kernel takes memory and gives it back."""
    kernels = {caller.id for caller in callers(taken) if caller.name in KERNELS}
    return any(caller.id in kernels for caller in callers(given))


def is_python(taken: Any, given: Any) -> bool:
    """Whether this is a number that meets a tensor, or the state of the random number generator."""
    size = taken.typed[1].alloc_size
    if taken.parent is None or not taken.parent.name.startswith("aten::"):  # by no operation
        return size <= NUMBER or size == torch.get_rng_state().numel()
    meeting = next((c for c in callers(taken) if c.name not in WRAPPING), None)
    return (
        size <= NUMBER and meeting is not None and any(c.id == meeting.id for c in callers(given))
    )


def is_allocation(node: Any) -> bool:
    """Whether memory is taken or given back."""
    return node.typed[0] == _EventType.Allocation


def callers(node: Any) -> Iterator[Any]:
    """The operations that were running, the innermost first."""
    while node.parent is not None:
        node = node.parent
        yield node


def walk(nodes: list[Any]) -> Iterator[Any]:
    """Every event of a tree."""
    for node in nodes:
        yield node
        yield from walk(node.children)
