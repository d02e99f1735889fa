"""Split feature maps into tiles: consecutive rows along one axis, or some channels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from unet3d.custom_ops import get_device_type
from unet3d.text import MIB
from unet3d.types import WHOLE_MAPS_MIB

TILE_BYTES = {"cpu": 16 * 2**20, "cuda": 64 * 2**20}
"""Size of a tile's input and output for one volume, which makes memory affine in the batch size.

A GPU needs large tiles: a launch takes the host longer than the work on a small tile takes the GPU.
"""
NO_GRAD_TILE_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""The same where no gradient is needed: what is not stored leaves room for larger tiles."""
MIN_ROWS = 8
"""A tile of fewer rows would be mostly halo."""


@dataclass(frozen=True)
class MapLayout:
    """The layout that all feature maps of a level share; tiles split `axis` (2 is D, 3 is H)."""

    batch: int
    size: tuple[int, int, int]  # D, H, W
    axis: int
    dtype: torch.dtype
    device: torch.device
    tile_bytes: int

    @cached_property
    def rows(self) -> int:
        """Return the size along the tiled axis."""
        return self.size[self.axis - 2]

    @property
    def is_whole(self) -> bool:
        """Return whether tiles are whole maps, because there is memory to spare."""
        return self.tile_bytes >= WHOLE_MAPS_MIB * MIB

    @cached_property
    def accumulate_dtype(self) -> torch.dtype:
        """Return the dtype of sums: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    def shrink(self, factors: Sequence[int]) -> "MapLayout":
        """Return the layout after a pooling or a stride, which drop what fills no window."""
        d, h, w = (n // factor for n, factor in zip(self.size, factors, strict=True))
        return replace(self, size=(d, h, w))

    def get_row_bytes(self, channels: int) -> int:
        """Return the bytes of a row of one volume's map."""
        return channels * prod(self.size) // self.rows * self.dtype.itemsize

    def empty(self, channels: int, rows: int | None = None) -> Tensor:
        """Allocate a channels-last map, or `rows` rows of one."""
        size = list(self.size)
        if rows is not None:
            size[self.axis - 2] = rows
        return torch.empty(
            (self.batch, channels, *size),
            dtype=self.dtype,
            device=self.device,
            memory_format=torch.channels_last_3d,
        )

    def empty_numbers(self, channels: int) -> Tensor:
        """Allocate a number per volume and channel, (B, C), in the dtype of sums."""
        size = (self.batch, channels)
        return torch.empty(size, dtype=self.accumulate_dtype, device=self.device)

    def narrow_rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a map as a view."""
        return x.narrow(self.axis, start, stop - start)

    def tiles(
        self,
        channels: int,
        *,
        min_rows: int | None = None,
        max_rows: int | None = None,
        multiple: int = 1,
    ) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of tiles of about `tile_bytes`, given input plus output channels.

        Every tile but the last has at least `min_rows` rows, about `max_rows` at most, and a
        `multiple` of rows; the last one has the rest.
        """
        min_rows = MIN_ROWS if min_rows is None else min_rows
        rows = max(min_rows, self.tile_bytes // self.get_row_bytes(channels))
        count = max(1, self.rows // (rows if max_rows is None else min(rows, max_rows)))
        # Tiles of one size let the caching allocator reuse their memory.
        step = -(-self.rows // (count * multiple)) * multiple
        starts = range(0, self.rows - multiple + 1, step)
        for start in starts:
            yield start, self.rows if start == starts[-1] else start + step


def choose_tile_bytes(x: Tensor, configured: int | None) -> int:
    """Return the size of tiles: the configured one, or that for the device of x."""
    if configured is not None:
        return configured
    sizes = TILE_BYTES if torch.is_grad_enabled() else NO_GRAD_TILE_BYTES
    return sizes.get(get_device_type(x), sizes["cpu"])


def merge_moments(total: Tensor, count: int, part: Tensor, n: int) -> None:
    """Add the moments (2, B, C) of n values per volume and channel to those of `count` values."""
    if not count:
        total.copy_(part)
        return
    change = part[0] - total[0]
    total[0] += change * (n / (count + n))
    total[1] += part[1] + change.square_() * (count * n / (count + n))
