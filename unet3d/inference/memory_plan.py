"""What segmenting a volume takes, before it starts, and the cheapest way that fits."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations
from math import prod

from unet3d.inference.window_order import (
    Span,
    WindowSchedule,
    compute_span_length,
    compute_window_starts,
)
from unet3d.types import Triple

FLOAT = 4
"""Bytes of a number in fp32."""


@dataclass(frozen=True, kw_only=True)
class InferenceProblem:
    """A volume and the networks that are to segment it."""

    shape: Triple  # of the prepared volume
    box: Triple  # of its part of the file's grid
    channels: int
    classes: int  # channels of the logits
    patch: Triple
    overlap: float
    batch_size: int
    window_bytes: int  # what a batch of windows takes on its device, from its input to its logits
    held: int  # bytes of RAM that stay: the image and what is written


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes that there are."""

    ram: int
    gpu: int | None = None  # None: windows are computed on the CPU


@dataclass(frozen=True)
class Slab:
    """A walk of its own, and the columns that are decided in it."""

    walk: WindowSchedule
    columns: Span


@dataclass(frozen=True, kw_only=True)
class InferencePlan:
    """How a volume is walked, and what that takes at most."""

    strips: tuple[Slab, ...]
    sums_in_ram: bool
    ram: int
    gpu: int  # 0 if windows are computed on the CPU
    extra: float  # windows that are computed again at seams, as a share

    @property
    def order(self) -> Triple:
        """The volume's axes as they are walked."""
        return self.strips[0].walk.order

    @property
    def windows(self) -> int:
        """How many are computed."""
        return sum(len(strip.walk.windows) for strip in self.strips)

    def fits(self, budget: Budget) -> bool:
        """Whether there is that much."""
        return self.ram <= budget.ram and self.gpu <= (budget.gpu or 0)


def choose_plan(job: InferenceProblem, budget: Budget) -> InferencePlan:
    """The first that fits: with sums on the GPU, in RAM, in more and more strips.

    If none does, the one that takes least, for the one who asks to say what is missing.
    """
    whole = sorted(list_plans(job, budget, strips=False), key=_preference)
    for found in whole:
        if found.fits(budget):
            return found
    cut = sorted(list_plans(job, budget, strips=True), key=_preference)
    for found in cut:
        if found.fits(budget):
            return found
    return min(whole + cut, key=lambda found: (found.gpu, found.ram))


def _preference(found: InferencePlan) -> tuple[int, bool, int]:
    return found.windows, found.sums_in_ram, found.ram + found.gpu


def list_plans(job: InferenceProblem, budget: Budget, *, strips: bool) -> Iterator[InferencePlan]:
    """Every order of the axes; whole, or in every number of strips."""
    for d, h, w in permutations(range(3)):
        order = (d, h, w)
        begins = compute_window_starts(job.shape[h], job.patch[h], job.overlap)
        for count in range(2, len(begins) + 1) if strips else (1,):
            parts = tuple(_strips(job, order, begins, count))
            windows = sum(len(part.walk.windows) for part in parts)
            once = prod(
                len(compute_window_starts(n, p, job.overlap))
                for n, p in zip(job.shape, job.patch, strict=True)
            )
            for sums_in_ram in (True,) if budget.gpu is None else (False, True):
                ram, gpu = _bytes(job, parts, sums_in_ram=sums_in_ram, gpu=budget.gpu is not None)
                yield InferencePlan(
                    strips=parts,
                    sums_in_ram=sums_in_ram,
                    ram=ram,
                    gpu=gpu,
                    extra=windows / once - 1,
                )


def _strips(job: InferenceProblem, order: Triple, begins: list[int], count: int) -> Iterator[Slab]:
    """Columns from a window's begin to another's; the one before is interpolated with."""
    size = job.shape[order[1]]
    interpolated = size != job.box[order[1]]
    edges = [0, *(begins[n * len(begins) // count] for n in range(1, count)), size]
    for start, stop in pairwise(edges):
        first = max(0, start - interpolated)
        walk = WindowSchedule(
            size=job.shape,
            patch=job.patch,
            overlap=job.overlap,
            order=order,
            columns=(first, stop),
            batch_size=job.batch_size,
        )
        yield Slab(walk, (start, stop))


def _bytes(
    job: InferenceProblem, strips: tuple[Slab, ...], *, sums_in_ram: bool, gpu: bool
) -> tuple[int, int]:
    """(RAM, GPU): what is held, the sums, and the most of what comes and goes beside them."""
    walks = [strip.walk for strip in strips]
    sums = max(_sums(job, walk) for walk in walks)
    passing = max(_passing(job, walk) for walk in walks)
    if not gpu:
        return job.held + sums + max(passing, job.window_bytes), 0
    if sums_in_ram:
        return job.held + sums + passing, job.window_bytes
    return job.held, sums + max(passing, job.window_bytes)


def _sums(job: InferenceProblem, walk: WindowSchedule) -> int:
    """The open bars, the windows' weights, and the rows and columns kept to interpolate with."""
    a, b, c = walk.order
    numbers = walk.open_voxels * (job.classes + 1) + prod(job.patch)
    if job.shape[a] != job.box[a]:
        numbers += job.classes * compute_span_length(walk.wanted) * job.shape[c]
    if job.shape[b] != job.box[b]:
        numbers += job.classes * 2 * job.patch[a] * job.shape[c]
    return FLOAT * numbers


def _passing(job: InferenceProblem, walk: WindowSchedule) -> int:
    """A batch with its logits and the piece of them that is added, or a row that is decided."""
    _, b, c = walk.order
    rows, columns = (max(map(compute_span_length, cuts)) for cuts in walk.cuts)
    window = (job.channels + job.classes) * prod(job.patch)
    piece = job.classes * rows * columns * job.patch[c]
    along = max(job.shape[c], job.box[c])
    decided = -(-columns * job.box[b] // job.shape[b]) + 1
    row = job.classes * (3 * (columns + 1) * job.shape[c] + 5 * decided * along)
    return FLOAT * max(job.batch_size * window + 2 * piece, row)
