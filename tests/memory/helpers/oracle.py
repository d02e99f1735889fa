"""Record what two training steps allocate on a CPU, and what the estimate says.

The measured side runs the traced step on real tensors under torch's profiler, which records every
allocation and the operations that were running. Two things are excluded: memory that a kernel
allocates and frees before it returns, for the kernels listed here only (a GPU's kernels differ, and
the estimate does not cover them); and what is on the CPU wherever the network is: Python numbers,
which torch wraps in tensors, and random number generator states that checkpointing saves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from unet3d.memory.estimate import trace_step
from unet3d.step.training_step import RandomBatchStep

KERNELS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "the scores of a block, for each thread",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "see above, and a copy",
    "aten::_fft_c2r": "copies of its input, which it overwrites",
    "aten::add": "an operand in the dtype of the result; CUDA converts on read",
    "aten::mul": "see above",
    "aten::convolution": "oneDNN reorders input, weight and output into blocks",
    "aten::convolution_backward": "see above",
    "aten::mm": "oneDNN reorders half-precision operands",
    "aten::mkldnn_convolution": "see above",
    "aten::to_mkldnn": "a contiguous copy, which is then reordered",
    "aten::logsumexp": "the exponentials, in an order of its own",
    "aten::native_batch_norm": "partial sums of the statistics",
    "aten::native_batch_norm_backward": "a copy of the gradient",
    "aten::native_group_norm_backward": "sums over each channel",
    "aten::repeat": "the indices of the copies",
    "aten::upsample_nearest3d": "the neighbours along each axis",
    "aten::upsample_trilinear3d": "the neighbours along each axis and their weights",
    "unet3d::pool3d": "temporaries of plain PyTorch, used without a C++ compiler",
    "unet3d::pool3d_backward": "see above",
}
"""Operations that use temporary memory while they run, and what for."""

NUMBER = 8
"""Largest size of a Python number in bytes."""
WRAPPING = (
    "aten::empty",
    "aten::empty_strided",
    "aten::scalar_tensor",
    "aten::_to_copy",
    "aten::to",
)
"""Operations that convert a number to the dtype of the tensor that it is combined with."""
WRAPPED = ("scalar_tensor", "lift_fresh")
"""The operations of the same conversion in a trace."""

PHASE = "phase "


@dataclass(frozen=True)
class Memory:
    """Bytes allocated (> 0) or freed (< 0) in the first step, and in the second, as all later."""

    before: int  # bytes in use before the first step
    first: list[int]
    second: list[int]

    @property
    def peak(self) -> int:
        """Return the peak of the second step."""
        return max(accumulate(self.second, initial=self.before + sum(self.first)))

    @property
    def sequence(self) -> list[int]:
        """Return the sizes of both steps in order, with each run of allocations sorted."""
        runs = groupby(self.first + self.second, key=lambda nbytes: nbytes > 0)
        return [nbytes for allocates, run in runs for nbytes in (sorted(run) if allocates else run)]


class PhaseMarker:
    """Stands in for a Trace: writes the names of the phases to the profile."""

    def begin_phase(self, phase: str) -> None:
        with record_function(PHASE + phase):
            pass

    def label(self, tensors: Any, kind: str) -> None:
        """Do nothing: a profile has no kinds."""


def estimate(make_step: Callable[[], RandomBatchStep]) -> Memory:
    """Return what the estimate says."""
    result = trace_step(make_step, cuda=False)
    trace = result.trace
    start = next(p.start for p in trace.phases if p.phase == "forward")
    second, stop = result.steady_step

    def list_changes(events: list[int]) -> list[int]:
        blocks = [(1 if event > 0 else -1, trace.blocks[abs(event) - 1]) for event in events]
        return [
            sign * block.nbytes
            for sign, block in blocks
            if block.nbytes and (block.kind or block.op not in WRAPPED)
        ]

    spans = trace.events[:start], trace.events[start:second], trace.events[second:stop]
    before, *steps = map(list_changes, spans)
    return Memory(sum(before), *steps)


def measure(make_step: Callable[[], RandomBatchStep]) -> Memory:
    """Return what the profiler records."""
    step: Any = make_step()
    tensors = [*step.model.parameters(), *step.model.buffers()]
    before = sum(t.untyped_storage().nbytes() for t in tensors)
    return measure_script(lambda: partial(step.train, PhaseMarker()), before)


def measure_script(build: Callable[[], Callable[[], Any]], before: int = 0) -> Memory:
    """Return what the profiler records of a function that returns a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step = build()
        for _ in range(2):
            PhaseMarker().begin_phase("step")
            step()
    results: Any = profiled.profiler.kineto_results  # ty: ignore[possibly-missing-attribute]
    nodes = sorted(walk(results.experimental_event_tree()), key=lambda node: node.start_time_ns)
    excluded = find_excluded(nodes)
    steps: list[list[int]] = [[]]
    for n, node in enumerate(nodes):
        if node.name == PHASE + "step":
            steps.append([])
        elif is_allocation(node) and n not in excluded:
            steps[-1].append(node.typed[1].alloc_size)
    built, first, second = steps
    return Memory(before + sum(built), first, second)


def find_excluded(nodes: list[Any]) -> set[int]:
    """Return the indices of allocations and frees that the estimate does not cover."""
    excluded: set[int] = set()
    live: dict[int, int] = {}  # address -> index of its allocation
    for n, node in enumerate(nodes):
        if not is_allocation(node):
            continue
        address = node.typed[1].ptr
        if node.typed[1].alloc_size > 0:
            live[address] = n
        elif address not in live:
            excluded.add(n)  # allocated before the profile
        else:
            allocated = live.pop(address)
            if is_python(nodes[allocated], node) or in_one_kernel(nodes[allocated], node):
                excluded |= {allocated, n}
    return excluded


def in_one_kernel(allocated: Any, freed: Any) -> bool:
    """Return whether one call of a kernel allocates and frees the memory."""
    kernels = {caller.id for caller in iter_callers(allocated) if caller.name in KERNELS}
    return any(caller.id in kernels for caller in iter_callers(freed))


def is_python(allocated: Any, freed: Any) -> bool:
    """Return whether the memory is a Python number's or a random number generator state's."""
    size = allocated.typed[1].alloc_size
    if allocated.parent is None or not allocated.parent.name.startswith("aten::"):
        return size <= NUMBER or size == torch.get_rng_state().numel()
    operation = next((c for c in iter_callers(allocated) if c.name not in WRAPPING), None)
    return (
        size <= NUMBER
        and operation is not None
        and any(c.id == operation.id for c in iter_callers(freed))
    )


def is_allocation(node: Any) -> bool:
    """Return whether an event allocates or frees memory."""
    return node.typed[0] == _EventType.Allocation


def iter_callers(node: Any) -> Iterator[Any]:
    """Yield the operations that were running, the innermost first."""
    while node.parent is not None:
        node = node.parent
        yield node


def walk(nodes: list[Any]) -> Iterator[Any]:
    """Yield every event of a tree."""
    for node in nodes:
        yield node
        yield from walk(node.children)
