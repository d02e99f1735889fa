"""The largest batch that fits a budget, from two traces: a block's size is affine in the batch."""

from collections.abc import Iterator

import numpy as np

from unet3d.memory.allocator import UNIT, replay
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.record import MemoryRecord
from unet3d.units import MIB

CONTEXT = 600 * MIB
"""Left aside on a card for what torch's allocator does not see: CUDA's context, cuDNN's kernels."""


class BatchExtrapolation:
    """What a step takes at any batch size from 2 up, exactly as a trace of its own would say."""

    def __init__(self, two: MemoryEstimate, three: MemoryEstimate):
        events = list(canonicalize_order(two.trace.events))
        self.affine = events == list(canonicalize_order(three.trace.events))
        self._events = events
        self._steady = two.steady
        if self.affine:
            at_two, at_three = (
                np.array([b.nbytes for b in p.trace.blocks], np.int64) for p in (two, three)
            )
            self._slope = at_three - at_two
            self._start = at_two - 2 * self._slope

    def peak(self, batch: int) -> MemoryRecord:
        """The peak of a steady step."""
        sizes = self._start + batch * self._slope
        begun, ended = self._steady
        events = np.array(self._events)
        taken = np.where(sizes > 0, -(-sizes // UNIT) * UNIT, 0)
        curve = np.cumsum(np.sign(events) * taken[np.abs(events) - 1])
        _, reserved = replay(self._events, sizes.tolist())
        return MemoryRecord(
            allocated=int(curve[begun:ended].max()), reserved=max(reserved[begun:ended])
        )


def canonicalize_order(events: list[int]) -> Iterator[int]:
    """The events with every run of frees sorted: autocast drops its cache in no fixed order.

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


def search_largest_batch(predictions: BatchExtrapolation, budget: int) -> int:
    """The largest batch whose reserved memory stays within `budget` bytes; below 2 means none."""

    def fits(batch: int) -> bool:
        return (predictions.peak(batch).reserved or 0) + CONTEXT <= budget

    if not fits(2):
        return 0
    low, high = 2, 4
    while fits(high) and high < 2**14:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
