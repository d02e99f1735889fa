"""Segment a scan that is larger than memory: slab by slab, from its files to those of its labels.

A slab reads the rows of its windows as they come, and its labels are written when it is done. A
prediction that was ended goes on after the last slab that it has written.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.data.formats.volumes import find_format, read_header, to_label_values
from unet3d.data.preprocessing.channels import FileGrid, reorient
from unet3d.data.preprocessing.regions import RegionImage
from unet3d.files import add_path_to_errors, read_json, write_text
from unet3d.inference.label_writer import (
    AxisInterpolator,
    LabelFunction,
    LabelWriter,
    Output,
)
from unet3d.inference.memory_plan import InferencePlan
from unet3d.inference.sliding_window import WindowRunner
from unet3d.inference.window_grid import Span, WindowGrid

CPU = torch.device("cpu")

FOLDER = ".unet3d"


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


class LabelStore:
    """Labels that are written part by part, and which slabs of them have been.

    They lie in a hidden file or folder until `finish`. `origin` says what they are made from: a
    part that was made from something else is removed.
    """

    def __init__(
        self,
        path: Path,
        like: Path,
        *,
        record: Path,
        origin: Mapping[str, Any],
        dtype: Any,
        values: Sequence[int] | None,
    ):
        self.path, self.values = path, values
        self.draft = path.with_name(f".part-{path.name}")
        self.record = record.with_name(f".part-{record.name}")
        self.state: dict[str, Any] = {"origin": dict(origin), "slabs": []}
        found: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            found = read_json(self.record)
        format = find_format(path)
        if self.draft.exists() and found.get("origin") == json.loads(json.dumps(dict(origin))):
            self.state = found
            self.array = format.open_labels(self.draft)
            return
        remove(self.draft)
        grid, dtype = read_header(like), to_label_values(np.zeros(1, dtype), values).dtype
        with add_path_to_errors(self.draft):
            self.array = format.create_labels(self.draft, dtype, like, grid)

    def has(self, order: Sequence[int], columns: Span) -> bool:
        """Return whether a slab has been written."""
        return any(
            axis == order[1] and first <= columns[0] and columns[1] <= last
            for axis, first, last in self.state["slabs"]
        )

    def write(self, order: Sequence[int], columns: Span, box: tuple, labels: np.ndarray) -> None:
        """Write the classes (D, H, W) of a box of the file, which are those of a slab."""
        with add_path_to_errors(self.draft):
            self.array[box] = to_label_values(labels, self.values)
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


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def segment_stored(
    image: RegionImage,
    runner: WindowRunner,
    plan: InferencePlan,
    decide: LabelFunction,
    labels: LabelStore,
    dtype: Any,
    region: Sequence[Span] | None,
) -> None:
    """Segment every slab that has no labels yet; write the labels of a region of the file."""
    grid, sum_device = image.grid, CPU if plan.sums_in_ram else runner.device
    box = tuple(stop - start for start, stop in grid.box)
    for slab in plan.slabs:
        window_grid = slab.window_grid
        if labels.has(window_grid.order, slab.columns):
            runner.on_windows(window_grid.count)
            continue
        axis = window_grid.order[1]
        columns = AxisInterpolator(grid.shape[axis], box[axis], CPU).find_ready(slab.columns)
        spans = [(0, size) for size in box]
        spans[axis] = columns.start, columns.stop
        part = np.zeros([stop - start for start, stop in spans], dtype)
        writer = LabelWriter(
            [Output(decide, part)],
            slab,
            sum_device,
            runner.make_head(sum_device),
            box=box,
            first_column=columns.start,
        )
        runner.run(SlabImage(image, window_grid), window_grid, writer.write, sum_device)
        place, part = grid.locate(spans), undo(part, grid)
        if region is not None:
            place, part = cut_out(place, part, region)
        labels.write(window_grid.order, slab.columns, place, part)


def cut_out(
    place: tuple[slice, ...], part: np.ndarray, region: Sequence[Span]
) -> tuple[tuple[slice, ...], np.ndarray]:
    """Return what of a part of a file, at its place, lies within a region."""
    placed, inner = [], []
    for side, span in zip(place, region, strict=True):
        start, stop = np.clip(span, side.start, side.stop).tolist()  # equal if none of it is within
        placed.append(slice(start, stop))
        inner.append(slice(start - side.start, stop - side.start))
    return tuple(placed), part[tuple(inner)]


def undo(part: np.ndarray, grid: FileGrid) -> np.ndarray:
    """Return a part (D, H, W) in the axes of its file."""
    shape = [0, 0, 0]
    for axis, size in zip(grid.axes, part.shape, strict=True):
        shape[axis] = size
    result = np.empty(shape, part.dtype)
    reorient(result, grid.axes, grid.flips)[...] = part
    return result
