"""Find the largest batch that fits a memory budget, from the traces of two."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import groupby

import numpy as np

from unet3d.memory.allocator import replay
from unet3d.memory.estimate import MemoryEstimate, add_context_bytes, find_most_reserved
from unet3d.peak_memory import MemoryRecord

LARGEST_BATCH = 2**14 - 1


class BatchExtrapolation:
    """The memory of a run at any batch size from 2 up, exactly as its own trace would give it.

    The size of every allocation is affine in the batch size, so two traces determine it; where they
    differ in their events, `affine` is False.
    """

    def __init__(self, two: MemoryEstimate, three: MemoryEstimate):
        # What follows the run is freed when Python collects its cycles, in no fixed order.
        self._events, others = (
            list(canonicalize_order(e.trace.events[: e.run_span[1]])) for e in (two, three)
        )
        self.affine = self._events == others
        self._run, self._graph_pool = slice(*two.run_span), two.trace.graph_pool
        self._trace = two.trace
        if self.affine:
            blocks = max(self._events)
            at_two, at_three = (
                np.array([b.nbytes for b in e.trace.blocks[:blocks]], np.int64)
                for e in (two, three)
            )
            self._slope = at_three - at_two
            self._base = at_two - 2 * self._slope

    def peak(self, batch: int) -> MemoryRecord:
        """Return the peak of a run."""
        sizes = self._base + batch * self._slope
        if not self._trace.cuda:  # exactly these, and nothing is reserved
            in_use = np.cumsum(np.sign(self._events) * sizes[np.abs(self._events) - 1])
            return MemoryRecord(allocated=int(in_use[self._run].max()))
        result = replay(self._events, sizes.tolist(), self._graph_pool)
        reserved = max(result.reserved[self._run])

        def replay_with(sums: np.ndarray) -> list[int]:
            larger = (sizes + sums[: len(sizes)]).tolist()
            return replay(self._events, larger, self._graph_pool).reserved[self._run]

        return MemoryRecord(
            allocated=max(result.allocated[self._run]),
            reserved=reserved,
            reserved_at_most=find_most_reserved(reserved, replay_with, self._trace),
        )

    def find_largest(self, budget: int, limit: int = LARGEST_BATCH) -> int:
        """Return the largest batch from 2 to `limit` that fits `budget` bytes; 0 if none does."""
        batches = range(2, limit + 1)
        fitting = bisect_right(batches, budget, key=lambda n: add_context_bytes(self.peak(n)))
        return fitting + 1 if fitting else 0


def canonicalize_order(events: list[int]) -> Iterator[int]:
    """Sort every run of frees: autocast clears its cache in no fixed order.

    >>> list(canonicalize_order([1, 2, -2, -1, 3]))
    [1, 2, -1, -2, 3]
    """
    for frees, run in groupby(events, key=lambda event: event < 0):
        numbers = list(run)
        yield from sorted(numbers, reverse=True) if frees else numbers


def find_fitting_batch(
    estimate: Callable[[int], MemoryEstimate], budget: int, limit: int = LARGEST_BATCH
) -> tuple[int, MemoryRecord] | None:
    """Return the largest batch up to `limit` that fits `budget` bytes, and its peak.

    A step that allocates differently at other batch sizes is traced at each size that is tried.
    """
    if limit > 2:
        extrapolation = BatchExtrapolation(estimate(2), estimate(3))
        if largest := extrapolation.affine and extrapolation.find_largest(budget, limit):
            return largest, extrapolation.peak(largest)
        limit = 1 if extrapolation.affine else limit
    found, low, high = None, 0, limit + 1  # low fits, high does not
    batch = min(2, limit)  # which usually fits
    while high - low > 1:
        peak = estimate(batch).run_peak
        if add_context_bytes(peak) <= budget:
            found, low = (batch, peak), batch
        else:
            high = batch
        batch = min(max(1, 2 * low), (low + high) // 2)
    return found
