"""Estimate the memory of segmenting a volume and choose the cheapest plan that fits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from math import prod

from unet3d.inference.heads import MAX_LOGITS
from unet3d.inference.window_grid import Span, WindowGrid, compute_window_starts
from unet3d.types import Triple

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class VolumeToSegment:
    """A volume and the networks to segment it with."""

    window_grid: WindowGrid  # all windows of the preprocessed volume, in any order of its axes
    box: Triple  # size of the same region at the file's resolution
    channels: int
    classes: int  # channels of the logits
    features: int = 0  # channels of all networks that are summed in their place
    window_bytes: int  # what a batch of windows takes on its device, from input to logits
    held_bytes: int  # bytes of RAM in use throughout: the image and the outputs

    @property
    def summed(self) -> int:
        return self.features or self.classes


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Available bytes."""

    ram_bytes: int
    gpu_bytes: int | None = None  # None: windows are computed on the CPU


@dataclass(frozen=True)
class Slab:
    """A window order of its own, and the columns that it writes."""

    window_grid: WindowGrid
    columns: Span


@dataclass(frozen=True, kw_only=True)
class InferencePlan:
    """How to schedule a volume's windows, and the peak memory."""

    slabs: tuple[Slab, ...]
    sums_in_ram: bool
    ram_bytes: int
    gpu_bytes: int  # 0 if windows are computed on the CPU

    @property
    def windows(self) -> int:
        return sum(len(slab.window_grid.windows) for slab in self.slabs)

    def fits(self, budget: Budget) -> bool:
        return self.ram_bytes <= budget.ram_bytes and self.gpu_bytes <= (budget.gpu_bytes or 0)


def choose_plan(volume: VolumeToSegment, budget: Budget) -> InferencePlan:
    """Return the first plan that fits: sums on the GPU, then in RAM, then in ever more slabs.

    If none fits, return the one that needs the least, so that the caller can report the shortfall.
    """
    plans: list[InferencePlan] = []
    for split in (False, True):
        plans += sorted(
            list_plans(volume, budget, split=split),
            key=lambda plan: (plan.windows, plan.sums_in_ram, plan.ram_bytes + plan.gpu_bytes),
        )
        if fitting := next((plan for plan in plans if plan.fits(budget)), None):
            return fitting
    return min(plans, key=lambda plan: (plan.gpu_bytes, plan.ram_bytes))


def list_plans(volume: VolumeToSegment, budget: Budget, *, split: bool) -> Iterator[InferencePlan]:
    """Yield a plan for every order of the axes, in one slab or in every larger number of slabs."""
    whole, held, window = volume.window_grid, volume.held_bytes, volume.window_bytes
    for d, h, w in permutations(range(3)):
        starts = compute_window_starts(whole.size[h], whole.patch[h], whole.overlap)
        for count in range(2, len(starts) + 1) if split else (1,):
            slabs = tuple(_split_into_slabs(volume, (d, h, w), starts, count))
            sums = max(_estimate_sums(volume, slab.window_grid) for slab in slabs)
            temporary = max(_estimate_temporaries(volume, slab.window_grid) for slab in slabs)
            peaks = [(True, held + sums + max(temporary, window), 0)]  # sums in RAM, RAM, GPU
            if budget.gpu_bytes is not None:
                peaks = [(False, held, sums + max(temporary, window))]
                peaks += [(True, held + sums + temporary, window)]
            for sums_in_ram, ram_bytes, gpu_bytes in peaks:
                yield InferencePlan(
                    slabs=slabs, sums_in_ram=sums_in_ram, ram_bytes=ram_bytes, gpu_bytes=gpu_bytes
                )


def _split_into_slabs(
    volume: VolumeToSegment, order: Triple, starts: list[int], count: int
) -> Iterator[Slab]:
    """Split the columns at window starts.

    If columns are resampled, a slab also computes the column before it, to interpolate with.
    """
    size = volume.window_grid.size[order[1]]
    resampled = size != volume.box[order[1]]
    edges = [0, *(starts[n * len(starts) // count] for n in range(1, count)), size]
    for start, stop in pairwise(edges):
        columns = (max(0, start - resampled), stop)
        yield Slab(replace(volume.window_grid, order=order, columns=columns), (start, stop))


def _estimate_sums(volume: VolumeToSegment, window_grid: WindowGrid) -> int:
    """Return the bytes of active tiles, the importance map, and rows and columns kept."""
    a, b, c = window_grid.order
    first, last = window_grid.column_span
    size, patch = window_grid.size, window_grid.patch
    numbers = window_grid.max_active_voxels * (volume.summed + 1) + prod(patch)
    if size[a] != volume.box[a]:
        numbers += volume.summed * (last - first) * size[c]
    if size[b] != volume.box[b]:
        numbers += volume.summed * 2 * patch[a] * size[c]
    return FLOAT32_BYTES * numbers


def _estimate_temporaries(volume: VolumeToSegment, window_grid: WindowGrid) -> int:
    """Return the bytes of a batch, its logits and the part being added, or of a written row."""
    _, b, c = window_grid.order
    size, patch = window_grid.size, window_grid.patch
    rows, columns = (max(stop - start for start, stop in s) for s in window_grid.tile_spans)
    window = (volume.channels + volume.summed) * prod(patch)
    part = volume.summed * rows * columns * patch[c]
    length = max(size[c], volume.box[c])
    written = -(-columns * volume.box[b] // size[b]) + 1
    row = volume.summed * (3 * (columns + 1) * size[c] + 5 * written * length)
    if volume.features:
        row += 3 * MAX_LOGITS  # logits, their probabilities, and what a decision takes
    return FLOAT32_BYTES * max(window_grid.batch_size * window + 2 * part, row)
