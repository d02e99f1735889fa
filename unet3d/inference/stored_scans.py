"""Segment a scan that is larger than memory: slab by slab, from its files to those of its labels.

A slab reads the rows of its windows as they come; its labels, and probabilities if they are asked
for, are written when it is done. A prediction that was ended goes on after its last slab, and
several processes may share the slabs.
"""

import json
import logging
import os
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.data.formats.volume_format import CHUNK, SLAB, iter_boxes
from unet3d.data.formats.volumes import find_format, read_header, split_suffix, to_label_values
from unet3d.data.preprocessing.channels import FileGrid, reorient
from unet3d.data.preprocessing.regions import RegionImage
from unet3d.files import add_path_to_errors, lock_file, read_json, write_text
from unet3d.inference.label_writer import (
    AxisInterpolator,
    LabelFunction,
    LabelWriter,
    Output,
)
from unet3d.inference.memory_plan import InferencePlan, make_slab
from unet3d.inference.sliding_window import WindowRunner
from unet3d.inference.window_grid import Span, WindowGrid

CPU = torch.device("cpu")

logger = logging.getLogger(__name__)

FOLDER = ".unet3d"

MANY_READS = 5
"""Times that each chunk of a file is read from which another layout is proposed."""


def get_record_path(labels: Path) -> Path:
    """Return the file of a record."""
    return labels.parent / FOLDER / f"{labels.name}.json"


class SlabImage:
    """The part of an image that a slab's windows cover, of which a row of windows is held."""

    def __init__(self, image: RegionImage, window_grid: WindowGrid):
        self.image, self.rows = image, window_grid.order[0]
        self.spans: list[Span] = [(0, size) for size in image.shape[1:]]
        columns, starts = window_grid.order[1], window_grid.starts[1]
        last = starts[-1] + window_grid.patch[columns]
        self.spans[columns] = max(0, starts[0]), min(last, image.shape[1 + columns])
        self.spans[self.rows] = (0, 0)
        self.held = np.empty((image.shape[0], *(b - a for a, b in self.spans)), np.float32)

    def __getitem__(self, index: Sequence[slice]) -> Tensor:
        """Return a window's part (C, d, h, w); windows come row by row."""
        box = list(index[1:])
        self._hold(box[self.rows].start, box[self.rows].stop)
        pairs = zip(box, self.spans, strict=True)
        part = [slice(side.start - first, side.stop - first) for side, (first, _) in pairs]
        return torch.from_numpy(self.held[(slice(None), *part)])

    def _hold(self, start: int, stop: int) -> None:
        first, last = self.spans[self.rows]
        if (start, stop) == (first, last):
            return
        kept = max(start, last)
        spans = list(self.spans)
        spans[self.rows] = (kept, stop)
        new, axis = self.image.read(spans), 1 + self.rows
        if kept > start:
            old = [slice(None)] * 4
            old[axis] = slice(start - first, None)
            new = np.concatenate([self.held[tuple(old)], new], axis)
        self.held, self.spans[self.rows] = new, (start, stop)


def get_probability_path(nifti: Path, labels: Path) -> Path:
    """Return where the probabilities of a scan are that is segmented by parts: as its labels."""
    return nifti.with_name(nifti.stem + split_suffix(labels)[1])


def quantize(activation: LabelFunction, logits: Tensor) -> Tensor:
    """Return probabilities as bytes: 255 is 1."""
    return activation(logits).mul_(255).round_().byte()


class LabelStore:
    """Labels that are written part by part, and which slabs of them have been.

    They lie in a hidden file or folder until `finish`. `origin` says what they are made from: a
    part that was made from something else is removed. With `channels`, there is a volume of each;
    the first one begins with 255 within `background`.
    """

    def __init__(
        self,
        path: Path,
        like: Path,
        *,
        origin: Mapping[str, Any],
        dtype: Any,
        values: Sequence[int] | None = None,
        channels: int | None = None,
        background: Sequence[Span] = (),
    ):
        self.path, self.values, self.dtype = path, values, dtype
        self.leading = () if channels is None else (channels,)
        self.draft, self.record = get_draft_paths(path)
        self.state: dict[str, Any] = {}
        self.record.parent.mkdir(parents=True, exist_ok=True)
        with self.locked():
            is_known = self.state.get("origin") == json.loads(json.dumps(dict(origin)))
            if self.draft.exists() and is_known:
                self.array = find_format(path).open_labels(self.draft)
            else:
                self.record.unlink(missing_ok=True)  # first: nothing that follows is recorded yet
                self._create(like, channels, background)
                self.state = {"origin": dict(origin), "slabs": []}
                write_text(self.record, json.dumps(self.state))

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep other processes from writing, and learn what they have written."""
        with lock_file(self.record.with_suffix(".lock")):
            with suppress(OSError, ValueError):
                self.state = read_json(self.record)
            yield

    def _create(self, like: Path, channels: int | None, background: Sequence[Span]) -> None:
        grid, format = read_header(like), find_format(self.path)
        dtype = to_label_values(np.zeros(1, self.dtype), self.values).dtype
        remove(self.draft)
        with add_path_to_errors(self.draft):
            self.array = format.create_labels(self.draft, dtype, like, grid, channels)
            sizes = [stop - start for start, stop in background]
            for part in iter_boxes(sizes, [CHUNK] * 3, SLAB) if sizes else ():
                pairs = zip(part, background, strict=True)
                box = (slice(side.start + n, side.stop + n) for side, (n, _) in pairs)
                voxels = [side.stop - side.start for side in part]
                self.array[(0, *box)] = np.full(voxels, 255, dtype)

    def has(self, order: Sequence[int], columns: Span) -> bool:
        """Return whether a slab has been written."""
        return any(
            axis == order[1] and first <= columns[0] and columns[1] <= last
            for axis, first, last in self.state["slabs"]
        )

    def write(self, order: Sequence[int], columns: Span, box: tuple, labels: np.ndarray) -> None:
        """Write the classes (..., D, H, W) of a box of the file, which are those of a slab."""
        with self.locked(), add_path_to_errors(self.draft):
            self.array[(..., *box)] = to_label_values(labels, self.values)
            if isinstance(self.array, np.memmap):
                self.array.flush()
            self.state["slabs"].append([order[1], *columns])
            write_text(self.record, json.dumps(self.state))

    def finish(self) -> None:
        """Complete the labels, and move them to their place."""
        del self.array  # Windows would not move a file that is mapped
        with add_path_to_errors(self.draft):
            find_format(self.path).finish_labels(self.draft)
        remove(self.path)
        self.draft.rename(self.path)
        self.record.unlink(missing_ok=True)


def get_draft_paths(labels: Path) -> tuple[Path, Path]:
    """Return where labels are that are being written part by part, and the record of these."""
    record = get_record_path(labels)
    return labels.with_name(f".part-{labels.name}"), record.with_name(f".part-{record.name}")


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def describe_chunk_reads(image: RegionImage, plan: InferencePlan) -> str | None:
    """Say how often the chunks of a file are read, if others would be read half as often."""
    file, part = image.channels.files[0], image.channels.parts[0]
    chunks = getattr(part.array, "chunks", None)
    if chunks is None:
        return None
    size = dict(zip(part.axes, chunks, strict=True))
    chunk = [size[axis] for axis in "xyz"]
    reads = count_chunk_reads(image, plan, chunk)
    if reads < MANY_READS or reads < 2 * count_chunk_reads(image, plan, [CHUNK] * 3):
        return None
    return (
        f"{file.name} has chunks of {'x'.join(map(str, chunk))} voxels, each of which is read "
        f"about {reads:.0f} times: a copy with chunks of {CHUNK}x{CHUNK}x{CHUNK} is read faster"
    )


def count_chunk_reads(image: RegionImage, plan: InferencePlan, chunk: Sequence[int]) -> float:
    """Return how often a chunk is read, on average."""
    grid, count = image.grid, 0

    def count_chunks(spans: Sequence[Span]) -> int:
        located = []  # before they are resampled
        for (start, stop), (first, last), n in zip(spans, grid.box, grid.shape, strict=True):
            located.append((start * (last - first) // n, ceil(stop * (last - first) / n)))
        sides = zip(grid.locate(located), chunk, strict=True)
        return prod(ceil(side.stop / n) - side.start // n for side, n in sides)

    whole: list[Span] = [(0, n) for n in grid.shape]
    for window_grid in (slab.window_grid for slab in plan.slabs):
        held, (rows, columns, _), spans = 0, window_grid.order, list(whole)
        starts, width = window_grid.starts[1], window_grid.patch[columns]
        spans[columns] = max(0, starts[0]), min(starts[-1] + width, whole[columns][1])
        for start in window_grid.starts[0]:
            spans[rows] = held, min(start + window_grid.patch[rows], whole[rows][1])
            count, held = count + count_chunks(spans), spans[rows][1]
    return count / count_chunks(whole)


def share_slabs(
    plan: InferencePlan, image: RegionImage, store: LabelStore, count: int
) -> InferencePlan:
    """Return the plan with the slabs of the first process of a command that comes here.

    Each plans by what it has measured, and the slabs of two plans may differ.
    """
    command = [os.getppid(), count]
    with store.locked():
        if store.state.get("command") != command:
            slabs = [(*slab.window_grid.order, *slab.columns) for slab in plan.slabs]
            store.state |= {"command": command, "planned": slabs}
            write_text(store.record, json.dumps(store.state))
    d, h, w = (stop - start for start, stop in image.grid.box)
    whole = plan.slabs[0].window_grid
    slabs = (
        make_slab(whole, (d, h, w), (a, b, c), (start, stop))
        for a, b, c, start, stop in store.state["planned"]
    )
    return replace(plan, slabs=tuple(slabs))


def segment_stored(
    image: RegionImage,
    runner: WindowRunner,
    plan: InferencePlan,
    outputs: Mapping[LabelStore, LabelFunction],
    region: Sequence[Span] | None,
    share: tuple[int, int],
) -> None:
    """Segment every slab whose outputs are not all written; write those of a region of the file.

    A share of (n, count) is every count-th slab from the n-th on.
    """
    if not share[0] and (advice := describe_chunk_reads(image, plan)):
        logger.warning(advice)
    grid, sum_device = image.grid, CPU if plan.sums_in_ram else runner.device
    box = tuple(stop - start for start, stop in grid.box)
    for slab in plan.slabs[share[0] :: share[1]]:
        window_grid = slab.window_grid
        if all(store.has(window_grid.order, slab.columns) for store in outputs):
            runner.on_windows(window_grid.count)
            continue
        axis = window_grid.order[1]
        columns = AxisInterpolator(grid.shape[axis], box[axis], CPU).find_ready(slab.columns)
        spans = [(0, size) for size in box]
        spans[axis] = columns.start, columns.stop
        size = [stop - start for start, stop in spans]
        parts = [np.zeros((*store.leading, *size), store.dtype) for store in outputs]
        writer = LabelWriter(
            [Output(d, part) for d, part in zip(outputs.values(), parts, strict=True)],
            slab,
            sum_device,
            runner.make_head(sum_device),
            box=box,
            first_column=columns.start,
        )
        runner.run(SlabImage(image, window_grid), window_grid, writer.write, sum_device)
        del writer
        for store in outputs:
            place, part = grid.locate(spans), undo(parts.pop(0), grid)
            if region is not None:
                place, part = cut_out(place, part, region)
            store.write(window_grid.order, slab.columns, place, part)


def finish(outputs: Iterable[LabelStore], plan: InferencePlan) -> bool:
    """Complete the outputs, in their order; False: another process does, or has done it."""
    with ExitStack() as stack:
        for store in outputs:
            stack.enter_context(store.locked())
            if not store.record.exists() or not all(
                store.has(slab.window_grid.order, slab.columns) for slab in plan.slabs
            ):
                return False
        for store in outputs:
            store.finish()
    return True


def cut_out(
    place: tuple[slice, ...], part: np.ndarray, region: Sequence[Span]
) -> tuple[tuple[slice, ...], np.ndarray]:
    """Return what of a part of a file, at its place, lies within a region."""
    placed, inner = [], []
    for side, span in zip(place, region, strict=True):
        start, stop = np.clip(span, side.start, side.stop).tolist()  # equal if none of it is within
        placed.append(slice(start, stop))
        inner.append(slice(start - side.start, stop - side.start))
    return tuple(placed), part[(..., *inner)]


def undo(part: np.ndarray, grid: FileGrid) -> np.ndarray:
    """Return a part (..., D, H, W) in the axes of its file."""
    shape = [0, 0, 0]
    for axis, size in zip(grid.axes, part.shape[-3:], strict=True):
        shape[axis] = size
    result = np.empty((*part.shape[:-3], *shape), part.dtype)
    reorient(result, grid.axes, grid.flips)[...] = part
    return result
