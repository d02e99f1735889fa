"""Estimate the memory of segmenting a volume and choose the cheapest plan that fits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from math import prod

from unet3d.errors import DoesNotFitError
from unet3d.inference.heads import MAX_LOGITS
from unet3d.inference.window_grid import Span, WindowGrid, compute_window_starts
from unet3d.text import format_bytes
from unet3d.types import Triple

FLOAT32_BYTES = 4
READ_BYTES = 16  # that a voxel takes which is read, normalized, resampled and held
MANY = 12  # slabs; above this number, not every number of slabs is tried


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
    stored_label_bytes: int = 0  # of a voxel's label, where image and outputs stay in files

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
        return sum(slab.window_grid.count for slab in self.slabs)

    def fits(self, budget: Budget) -> bool:
        return self.ram_bytes <= budget.ram_bytes and self.gpu_bytes <= (budget.gpu_bytes or 0)


def choose_plan(volume: VolumeToSegment, budget: Budget, processes: int = 1) -> InferencePlan:
    """Return the first plan that fits: sums on the GPU, then in RAM, then in ever more slabs.

    If none fits, return the one that needs the least, so that the caller can report the shortfall.
    Several processes share the slabs: each has at least one, where the volume has enough windows.
    """
    plans: list[InferencePlan] = []
    for split in (False, True):
        plans += sorted(
            list_plans(volume, budget, split=split),
            key=lambda plan: (plan.windows, plan.sums_in_ram, plan.ram_bytes + plan.gpu_bytes),
        )
        fitting = [plan for plan in plans if plan.fits(budget)]
        if found := next((plan for plan in fitting if len(plan.slabs) >= processes), None):
            return found
    if fitting:
        return max(fitting, key=lambda plan: len(plan.slabs))
    return min(plans, key=lambda plan: (plan.gpu_bytes, plan.ram_bytes))


def list_plans(volume: VolumeToSegment, budget: Budget, *, split: bool) -> Iterator[InferencePlan]:
    """Yield a plan for every order of the axes, in one slab or in every larger number of slabs."""
    whole, window = volume.window_grid, volume.window_bytes
    for d, h, w in permutations(range(3)):
        starts = compute_window_starts(whole.size[h], whole.patch[h], whole.overlap)
        for count in list_counts(len(starts)) if split else (1,):
            slabs = tuple(_split_into_slabs(volume, (d, h, w), starts, count))
            grids = {_locate_columns(slab): slab.window_grid for slab in slabs}.values()
            sums = max(_estimate_sums(volume, window_grid) for window_grid in grids)
            temporary = max(_estimate_temporaries(volume, window_grid) for window_grid in grids)
            held = volume.held_bytes + max(_estimate_stored(volume, grid) for grid in grids)
            peaks = [(True, held + sums + max(temporary, window), 0)]  # sums in RAM, RAM, GPU
            if budget.gpu_bytes is not None:
                peaks = [(False, held, sums + max(temporary, window))]
                peaks += [(True, held + sums + temporary, window)]
            for sums_in_ram, ram_bytes, gpu_bytes in peaks:
                yield InferencePlan(
                    slabs=slabs, sums_in_ram=sums_in_ram, ram_bytes=ram_bytes, gpu_bytes=gpu_bytes
                )


def list_counts(most: int) -> list[int]:
    """Return numbers of slabs from 2 on, all of them while they are few.

    >>> list_counts(40)
    [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 18, 22, 27, 33, 40]
    """
    counts = list(range(2, min(most, MANY) + 1))
    while counts and counts[-1] < most:
        counts.append(min(most, counts[-1] * 5 // 4))
    return counts


def _split_into_slabs(
    volume: VolumeToSegment, order: Triple, starts: list[int], count: int
) -> Iterator[Slab]:
    """Split the columns at window starts."""
    size = volume.window_grid.size[order[1]]
    edges = [0, *(starts[n * len(starts) // count] for n in range(1, count)), size]
    for span in pairwise(edges):
        yield make_slab(volume.window_grid, volume.box, order, span)


def make_slab(window_grid: WindowGrid, box: Triple, order: Triple, span: Span) -> Slab:
    """Return the slab of some columns.

    If columns are resampled, a slab also computes the column before it, to interpolate with.
    """
    is_resampled = window_grid.size[order[1]] != box[order[1]]
    columns = (max(0, span[0] - is_resampled), span[1])
    return Slab(replace(window_grid, order=order, columns=columns), span)


def _locate_columns(slab: Slab) -> tuple[int, ...]:
    """Return where a slab's windows start and its columns end; slabs that agree need the same."""
    first, last = slab.window_grid.column_span
    return (last - first, *(start - first for start in slab.window_grid.starts[1]))


def _estimate_stored(volume: VolumeToSegment, window_grid: WindowGrid) -> int:
    """Return the bytes of a slab's labels, in two orders of axes, and of a row of its windows."""
    if not volume.stored_label_bytes:
        return 0
    a, b, c = window_grid.order
    size, patch, starts = window_grid.size, window_grid.patch, window_grid.starts[1]
    first, last = window_grid.column_span
    columns = (last - first) * volume.box[b] / size[b] + 1
    labels = 3 * volume.stored_label_bytes * volume.box[a] * columns * volume.box[c]
    covered = min(starts[-1] + patch[b], size[b]) - max(starts[0], 0)
    voxels = min(patch[a], size[a]) * covered * size[c]
    enlarged = max(1.0, prod(volume.box) / prod(size))  # what is read to be resampled
    return int(labels + READ_BYTES * volume.channels * voxels * enlarged)


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


def check_plan(plan: InferencePlan, budget: Budget, ram_advice: str) -> None:
    """Refuse a plan that needs more than there is."""
    if plan.gpu_bytes > (budget.gpu_bytes or 0):
        raise DoesNotFitError(
            f"its windows need {format_bytes(plan.gpu_bytes)} on the GPU, "
            f"{format_bytes(budget.gpu_bytes or 0)} are free: close other programs on the GPU, "
            "or predict with batch_size=1, precision=bf16 or device=cpu"
        )
    if plan.ram_bytes > budget.ram_bytes:
        raise DoesNotFitError(
            f"needs at least {describe_cost(plan)}; {format_bytes(budget.ram_bytes)} are "
            f"available: {ram_advice}"
        )


def describe_cost(plan: InferencePlan) -> str:
    """Describe the memory that a plan takes, and what it does to take less."""
    cost = f"{format_bytes(plan.ram_bytes)} of RAM"
    if plan.gpu_bytes:
        cost = f"{format_bytes(plan.gpu_bytes)} on the GPU, {cost}"
        cost += " (logits are summed in RAM)" if plan.sums_in_ram else ""
    if len(plan.slabs) > 1:
        cost += f", in {len(plan.slabs)} slabs"
    return cost
