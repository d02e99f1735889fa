"""Which windows of a volume come when, so that as little as can be is open at a time.

The volume is cut where windows begin and end. Along the walk's first two axes the cuts make bars,
which span the third axis whole: a bar is opened by the first window that covers it and finished
with the last one. Windows go row by row, so that about as much is open as half a window is thick.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product

from unet3d.types import Triple

Span = tuple[int, int]
"""Start and stop along an axis."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns that the same windows cover, from the `first` to the `last` by number."""

    rows: Span
    columns: Span
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class WindowSchedule:
    """Which windows in which order, and what is open meanwhile."""

    size: Triple  # of the volume
    patch: Triple
    overlap: float
    order: Triple = (0, 1, 2)  # the volume's axes: of the rows, the columns, and along the bars
    columns: Span | None = None  # only these are wanted; None: all
    batch_size: int = 1

    @property
    def wanted(self) -> Span:
        """The columns that are wanted."""
        return self.columns or (0, self.size[self.order[1]])

    @cached_property
    def starts(self) -> list[list[int]]:
        """Of the windows along the rows, the columns and the bars."""
        rows, columns, along = (
            compute_window_starts(self.size[axis], self.patch[axis], self.overlap)
            for axis in self.order
        )
        begin, end = self.wanted
        thick = self.patch[self.order[1]]
        return [rows, [s for s in columns if s < end and s + thick > begin], along]

    @cached_property
    def windows(self) -> list[Triple]:
        """Where they begin, in the volume's axes; below 0 where the volume is smaller."""
        d, h, w = (self.order.index(axis) for axis in range(3))
        return [(at[d], at[h], at[w]) for at in product(*self.starts)]

    @cached_property
    def cuts(self) -> tuple[list[Span], list[Span]]:
        """The rows and the columns of the bars."""
        a, b, _ = self.order
        rows, columns, _ = self.starts
        return split_at_edges(rows, self.patch[a], (0, self.size[a])), split_at_edges(
            columns, self.patch[b], self.wanted
        )

    @cached_property
    def bars(self) -> list[Tile]:
        """As they are finished: each after the bars before it along the rows and the columns."""
        a, b, _ = self.order
        _, columns, along = self.starts
        found = []
        for row, column in product(*self.cuts):
            of_rows = find_windows_over(self.starts[0], self.patch[a], row)
            of_columns = find_windows_over(columns, self.patch[b], column)
            first = (of_rows[0] * len(columns) + of_columns[0]) * len(along)
            last = (of_rows[-1] * len(columns) + of_columns[-1] + 1) * len(along) - 1
            found.append(Tile(row, column, first, last))
        return sorted(found, key=lambda bar: (bar.last, bar.rows, bar.columns))

    @cached_property
    def open_voxels(self) -> int:
        """The most that is open at a time."""
        change = [0] * (len(self.windows) // self.batch_size + 2)
        for bar in self.bars:
            voxels = (
                compute_span_length(bar.rows)
                * compute_span_length(bar.columns)
                * self.size[self.order[2]]
            )
            change[bar.first // self.batch_size] += voxels
            change[bar.last // self.batch_size + 1] -= voxels
        return max(accumulate(change))

    def under(self, window: Triple) -> list[tuple[Span, Span]]:
        """The rows and columns of the bars that a window covers."""
        rows, columns = (
            [span for span in cuts if window[axis] <= span[0] < window[axis] + self.patch[axis]]
            for axis, cuts in zip(self.order, self.cuts, strict=False)
        )
        return list(product(rows, columns))

    def along(self, window: Triple) -> Span:
        """The part of its bars that a window covers."""
        axis = self.order[2]
        return max(window[axis], 0), min(window[axis] + self.patch[axis], self.size[axis])

    def placed(self, rows: Span, columns: Span, along: Span) -> list[Span]:
        """The same three spans in the volume's order of axes."""
        spans = dict(zip(self.order, (rows, columns, along), strict=True))
        return [spans[axis] for axis in range(3)]


def compute_window_starts(size: int, patch: int, overlap: float) -> list[int]:
    """Where windows begin along an axis, as MONAI has it.

    >>> compute_window_starts(20, 8, 0.5), compute_window_starts(5, 8, 0.5)
    ([0, 4, 8, 12], [-1])
    """
    if size <= patch:
        return [-((patch - size) // 2)]
    step = max(1, int(patch * (1 - overlap)))
    return [*range(0, size - patch, step), size - patch]


def split_at_edges(starts: Sequence[int], patch: int, within: Span) -> list[Span]:
    """The stretches between the windows' begins and ends.

    >>> split_at_edges([0, 4, 8], 8, (2, 16))
    [(2, 4), (4, 8), (8, 12), (12, 16)]
    """
    edges = {edge for start in starts for edge in (start, start + patch)}
    begin, end = within
    return list(pairwise(sorted({begin, end, *(e for e in edges if begin < e < end)})))


def find_windows_over(starts: Sequence[int], patch: int, span: Span) -> list[int]:
    """The numbers of the windows over a stretch."""
    return [n for n, start in enumerate(starts) if start <= span[0] < start + patch]


def compute_span_length(span: Span) -> int:
    """How many voxels."""
    return span[1] - span[0]
