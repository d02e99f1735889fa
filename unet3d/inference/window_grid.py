"""Order the windows of a volume so that few voxels are accumulated at a time.

Window edges cut the first two axes into tiles that span the whole third axis. A tile is active from
the first window that covers it to the last one. Windows go row by row, so about half a window's
thickness of rows is active at a time. Bundles carry this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import prod

import numpy as np

from unet3d.data.preprocessing.channels import Triple

Span = tuple[int, int]
"""Start and stop along an axis."""

MIN_IMPORTANCE = 1e-3
"""Smallest weight of a window's voxel relative to its center, as in MONAI."""


@dataclass(frozen=True)
class OutputTile:
    """A part of the volume that the same windows cover, whose indices go from `first` to `last`."""

    rows: Span
    columns: Span
    box: tuple[Span, Span, Span]  # along the volume's axes
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class WindowGrid:
    """The windows of a volume in their order, and the tiles that they cover."""

    size: Triple  # voxels of the volume
    patch: Sequence[int]
    overlap: float
    order: Triple = (0, 1, 2)  # the volume's axes for rows, columns and the tiles' length
    columns: Span | None = None  # only these columns are computed; None: all
    batch_size: int = 1

    @property
    def column_span(self) -> Span:
        return self.columns or (0, self.size[self.order[1]])

    @cached_property
    def starts(self) -> list[list[int]]:
        """Return where windows start along the rows, the columns and the tiles' length."""
        rows, columns, lengthwise = (
            compute_window_starts(self.size[axis], self.patch[axis], self.overlap)
            for axis in self.order
        )
        begin, end = self.column_span
        width = self.patch[self.order[1]]
        return [rows, [s for s in columns if s < end and s + width > begin], lengthwise]

    @property
    def count(self) -> int:
        """Return the number of windows."""
        return prod(map(len, self.starts))

    @cached_property
    def windows(self) -> list[Triple]:
        """Return where windows start (D, H, W); below 0 along axes shorter than a patch."""
        d, h, w = (self.order.index(axis) for axis in range(3))
        return [(start[d], start[h], start[w]) for start in product(*self.starts)]

    @cached_property
    def tile_spans(self) -> tuple[list[Span], list[Span]]:
        """Return the row spans and the column spans of the tiles."""
        a, b, _ = self.order
        row_starts, column_starts, _ = self.starts
        rows = split_at_edges(row_starts, self.patch[a], (0, self.size[a]))
        return rows, split_at_edges(column_starts, self.patch[b], self.column_span)

    @cached_property
    def tiles(self) -> list[OutputTile]:
        """Return the tiles as they are completed, after those above them and to their left."""
        a, b, c = self.order
        row_starts, column_starts, lengthwise = self.starts
        tiles, (row_spans, column_spans) = [], self.tile_spans
        over_rows = [find_windows_over(row_starts, self.patch[a], span) for span in row_spans]
        over_columns = [find_windows_over(column_starts, self.patch[b], s) for s in column_spans]
        for (rows, over_row), (columns, over_column) in product(
            zip(row_spans, over_rows, strict=True), zip(column_spans, over_columns, strict=True)
        ):
            spans = {a: rows, b: columns, c: (0, self.size[c])}
            (first_row, last_row), (first_column, last_column) = over_row, over_column
            first = (first_row * len(column_starts) + first_column) * len(lengthwise)
            last = (last_row * len(column_starts) + last_column + 1) * len(lengthwise) - 1
            tiles.append(OutputTile(rows, columns, (spans[0], spans[1], spans[2]), first, last))
        return sorted(tiles, key=lambda tile: (tile.last, tile.rows, tile.columns))

    @cached_property
    def max_active_voxels(self) -> int:
        """Return the largest number of voxels in active tiles at any time."""
        change = [0] * (self.count // self.batch_size + 2)
        for tile in self.tiles:
            voxels = prod(stop - start for start, stop in tile.box)
            change[tile.first // self.batch_size] += voxels
            change[tile.last // self.batch_size + 1] -= voxels
        return max(accumulate(change))

    def find_tiles_under(self, window: Triple) -> list[OutputTile]:
        """Return the tiles that a window covers."""
        a, b, _ = self.order
        return [
            tile
            for tile in self.tiles
            if window[a] <= tile.rows[0] < window[a] + self.patch[a]
            and window[b] <= tile.columns[0] < window[b] + self.patch[b]
        ]

    def locate_window(self, window: Triple) -> tuple[tuple[slice, ...], list[Span]]:
        """Return a window's part of the volume, and its voxels before and behind it on each axis.

        >>> order = WindowGrid(size=(5, 20, 9), patch=(8, 8, 8), overlap=0.5)
        >>> order.locate_window((-1, 12, 0))
        ((slice(0, 5, None), slice(12, 20, None), slice(0, 8, None)), [(1, 2), (0, 0), (0, 0)])
        """
        spans = list(zip(window, self.patch, self.size, strict=True))
        inside = (slice(max(first, 0), min(first + side, n)) for first, side, n in spans)
        missing = [(max(-first, 0), max(first + side - n, 0)) for first, side, n in spans]
        return tuple(inside), missing


def compute_window_starts(size: int, patch: int, overlap: float) -> list[int]:
    """Return where windows start along an axis, as in MONAI.

    >>> compute_window_starts(20, 8, 0.5), compute_window_starts(5, 8, 0.5)
    ([0, 4, 8, 12], [-1])
    """
    if size <= patch:
        return [-((patch - size) // 2)]
    step = max(1, int(patch * (1 - overlap)))
    return [*range(0, size - patch, step), size - patch]


def make_gaussian_importance(patch: Sequence[int]) -> np.ndarray:
    """Return a window's importance map: a Gaussian with an eighth of its sides as sigma."""
    weights = np.ones((), np.float32)
    for side in patch:
        offset = np.arange(side, dtype=np.float32) - (side - 1) / 2
        weights = weights[..., None] * np.exp(-(offset**2) / (2 * (side / 8) ** 2))
    return weights.clip(min=MIN_IMPORTANCE)


def split_at_edges(starts: Sequence[int], patch: int, within: Span) -> list[Span]:
    """Split a span where windows start or stop.

    >>> split_at_edges([0, 4, 8], 8, (2, 16))
    [(2, 4), (4, 8), (8, 12), (12, 16)]
    """
    edges = {edge for start in starts for edge in (start, start + patch)}
    begin, end = within
    return list(pairwise(sorted({begin, end, *(e for e in edges if begin < e < end)})))


def find_windows_over(starts: Sequence[int], patch: int, span: Span) -> Span:
    """Return the indices of the first and the last window that cover a span."""
    indices = [n for n, start in enumerate(starts) if start <= span[0] < start + patch]
    return indices[0], indices[-1]
