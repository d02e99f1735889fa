"""Feature maps a few rows at a time: along which axis, and how many."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

SLAB_BYTES = 16 * 2**20
"""What a slab's input and output take, for one volume: so memory is affine in the batch."""
LEAST_ROWS = 8
"""A slab of fewer rows would be more halo than slab."""


@dataclass(frozen=True)
class MapLayout:
    """What the maps of one level have in common. Slabs cut the `axis`: 2 is D, 3 is H."""

    batch: int
    size: tuple[int, int, int]  # D, H, W
    axis: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def rows(self) -> int:
        """How many there are."""
        return self.size[self.axis - 2]

    @cached_property
    def accumulate_dtype(self) -> torch.dtype:
        """In which sums are made: float32 at least."""
        return torch.promote_types(self.dtype, torch.float32)

    def empty(self, channels: int, rows: int | None = None) -> Tensor:
        """Memory for a map, or for so many rows of one."""
        size = list(self.size)
        if rows is not None:
            size[self.axis - 2] = rows
        return torch.empty(
            (self.batch, channels, *size),
            dtype=self.dtype,
            device=self.device,
            memory_format=torch.channels_last_3d,
        )

    def narrow_rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a map."""
        return x.narrow(self.axis, start, stop - start)

    def slabs(
        self, channels: int, *, least: int = 1, multiple: int = 1
    ) -> Iterator[tuple[int, int]]:
        """(start, stop) of slabs that take about SLAB_BYTES, with so many channels in and out.

        All but the last have `least` rows and a `multiple` of rows; the last has the rest.
        """
        row = channels * prod(self.size) // self.rows * self.dtype.itemsize
        count = max(1, self.rows // max(LEAST_ROWS, least, SLAB_BYTES // row))
        step = (
            -(-self.rows // (count * multiple)) * multiple
        )  # equal, so that memory is found again
        starts = range(0, self.rows - multiple + 1, step)
        for start in starts:
            yield start, self.rows if start == starts[-1] else start + step


def longest_axis(size: Sequence[int]) -> int:
    """The axis of (B, C, D, H, W) to cut: W stays whole, so that rows are long."""
    return 2 if size[0] >= size[1] else 3
