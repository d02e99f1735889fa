"""Find the largest batch that fits a memory budget, from the traces of two batch sizes."""

from collections.abc import Iterator

import numpy as np

from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory.allocator import replay
from unet3d.memory.estimate import MemoryEstimate
from unet3d.peak_memory import MemoryRecord

LARGEST_BATCH = 2**14 - 1
NEARBY = 16
"""A batch whose memory shows what one volume more takes; two batches may take the same segments."""


class BatchExtrapolation:
    """The memory of a step at any batch size from 2 up, exactly as its own trace would give it.

    The size of every allocation is affine in the batch size, so two traces determine it; where they
    differ in their events, `affine` is False.
    """

    def __init__(self, two: MemoryEstimate, three: MemoryEstimate):
        events = list(canonicalize_order(two.trace.events))
        self.affine = events == list(canonicalize_order(three.trace.events))
        self._events = events
        self._steady_step, self._graph_pool = two.steady_step, two.trace.graph_pool
        if self.affine:
            at_two, at_three = (
                np.array([b.nbytes for b in p.trace.blocks], np.int64) for p in (two, three)
            )
            self._slope = at_three - at_two
            self._base = at_two - 2 * self._slope

    def peak(self, batch: int) -> MemoryRecord:
        """Return the peak of a steady-state step."""
        sizes = self._base + batch * self._slope
        start, stop = self._steady_step
        result = replay(self._events, sizes.tolist(), self._graph_pool)
        return MemoryRecord(
            allocated=max(result.allocated[start:stop]), reserved=max(result.reserved[start:stop])
        )


def canonicalize_order(events: list[int]) -> Iterator[int]:
    """Sort every run of frees: autocast clears its cache in no fixed order.

    >>> list(canonicalize_order([1, 2, -2, -1, 3]))
    [1, 2, -1, -2, 3]
    """
    run: list[int] = []
    for event in events:
        if event > 0:
            yield from sorted(run, reverse=True)
            run = []
            yield event
        else:
            run.append(event)
    yield from sorted(run, reverse=True)


def search_largest_batch(extrapolation: BatchExtrapolation, budget: int) -> int:
    """Return the largest batch that reserves at most `budget` bytes, or 0 if 2 is too large."""

    def measure(batch: int) -> int:
        return (extrapolation.peak(batch).reserved or 0) + CUDA_CONTEXT_BYTES

    low, at_low, high = 2, measure(2), LARGEST_BATCH + 1
    if at_low > budget:
        return 0
    # A straight line through two batches is close, so that few of the others are replayed.
    slope = max((measure(NEARBY) - at_low) / (NEARBY - 2), 1)
    halves = False
    while high - low > 1:
        guess = low + int((budget - at_low) / slope)
        batch = (low + high) // 2 if halves else min(max(guess, low + 1), high - 1)
        at_batch = measure(batch)
        width = high - low
        if at_batch <= budget:
            slope = max((at_batch - at_low) / (batch - low), 1)
            low, at_low = batch, at_batch
        else:
            slope = (at_batch - at_low) / (batch - low)
            high = batch
        halves = 2 * (high - low) > width and not halves
    return low
