"""Preprocess a scan that is larger than memory: its files are read by regions.

A region has the values that it has in the preprocessed scan, but for rounding: what normalization
and cropping have to know of the whole scan is measured block by block first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volume_format import StoredVoxels, iter_boxes
from unet3d.data.formats.volumes import open_voxels, read_header
from unet3d.data.preprocessing.channels import (
    AUTO,
    FileGrid,
    Intensity,
    choose_background_values,
    choose_interpolation_orders,
    compute_resampled_shape,
    find_orientation,
    get_spacing,
    make_interpolation_matrices,
    multiply_axes,
    normalize_in_place,
    reorient,
)
from unet3d.data.preprocessing.pipeline import (
    PreprocessedScan,
    Preprocessing,
    check_channels,
    describe_scan,
)
from unet3d.data.preprocessing.statistics import (
    MAX_VOXELS,
    measure_percentiles,
)
from unet3d.errors import UsageError

BLOCK = 2**22
"""Voxels that are measured at a time, about."""

NEGLIGIBLE = 1e-6
"""Weight below which a voxel is not read to interpolate another: a cubic spline has no end."""

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class StoredChannels:
    """The channels (C, D, H, W) of a scan, in one file or one file each."""

    files: Sequence[Path]
    parts: Sequence[StoredVoxels]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def read(self, box: Sequence[slice]) -> np.ndarray:
        parts = [part.read(box) for part in self.parts]
        for file, part in zip(self.files, parts, strict=True):
            if part.dtype.kind == "f" and not np.isfinite(part).all():
                raise UsageError(f"{file} holds NaN or infinite values")
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def list_blocks(self) -> list[tuple[slice, ...]]:
        """Return boxes that hold all voxels, each in whole chunks of the first file."""
        shape = self.shape
        return [*iter_boxes(shape[1:], self.parts[0].chunks[1:], BLOCK // shape[0])]


def open_channels(files: Sequence[Path]) -> StoredChannels | None:
    """Open the files of a scan; None: one of them cannot be read by parts."""
    parts = [open_voxels(file) for file in files]
    opened = [part for part in parts if part is not None]
    return StoredChannels(files, opened) if len(opened) == len(files) else None


@dataclass(eq=False)
class Moments:
    """Mean, variance and range of values that are added in parts."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared differences from the mean
    low: float = np.inf
    high: float = -np.inf

    def add(self, values: np.ndarray) -> None:
        if not values.size:
            return
        total, shift = self.count + values.size, float(values.mean(dtype=float)) - self.mean
        self.squares += float(values.var(dtype=float)) * values.size
        self.squares += shift**2 * self.count * values.size / total
        self.mean += shift * values.size / total
        self.count = total
        self.low, self.high = (
            min(self.low, float(values.min())),
            max(self.high, float(values.max())),
        )

    @property
    def intensity(self) -> Intensity:
        return self.mean, (self.squares / max(1, self.count)) ** 0.5, self.low, self.high


@dataclass(eq=False, kw_only=True)
class RegionImage:
    """A preprocessed image (C, D, H, W) of which regions are read from its files."""

    channels: StoredChannels
    grid: FileGrid
    orders: Sequence[int]  # of the interpolation along each axis
    normalize: Sequence[str]
    background: Sequence[float]
    intensities: Sequence[Intensity]
    nbytes: int = field(default=0, init=False)  # held in memory

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels.shape[0], *self.grid.shape)

    @cached_property
    def matrices(self) -> dict[int, np.ndarray]:
        cropped = [stop - start for start, stop in self.grid.box]
        return make_interpolation_matrices(cropped, self.grid.shape, self.orders)

    def read(self, spans: Spans) -> np.ndarray:
        """Return a region (C, d, h, w), float32."""
        spans, parts = list(spans), {}
        for axis, matrix in self.matrices.items():
            part = matrix[slice(*spans[axis])]
            needed = np.flatnonzero(np.abs(part).max(0) > NEGLIGIBLE)
            spans[axis] = int(needed[0]), int(needed[-1]) + 1
            parts[axis] = part[:, slice(*spans[axis])]
        stored = self.channels.read(self.grid.locate(spans))
        channels = []
        for c, method in enumerate(self.normalize):
            channel = reorient(stored[c], self.grid.axes, self.grid.flips).astype(np.float32)
            background = np.float32(self.background[c])
            normalize_in_place(channel, method, background, self.intensities[c])
            channels.append(multiply_axes(channel, parts))
        return np.stack(channels)


def preprocess_stored_scan(
    channels: StoredChannels,
    preprocessing: Preprocessing,
    names: Sequence[str],
    region: Spans | None = None,
    margin: Sequence[int] = (0, 0, 0),
) -> PreprocessedScan:
    """Preprocess a scan as `Preprocessing.preprocess_scan` does, without holding it.

    With a region, spans along the axes of the file, the image is that region with a margin of
    preprocessed voxels around it.
    """
    shape, affine = channels.shape, read_header(channels.files[0]).affine
    check_channels(", ".join(file.name for file in channels.files), shape[0], names)
    if any(stop > size for (_, stop), size in zip(region or (), shape[1:], strict=False)):
        raise UsageError(
            f"region={list(chain(*region or ()))} must be x0, x1, y0, y1, z0, z1 within a scan of "
            f"{'x'.join(map(str, shape[1:]))} voxels"
        )
    blocks = channels.list_blocks()
    axes, flips = find_orientation(affine, preprocessing.orientation)
    background = find_stored_background(channels, preprocessing.background)
    found = [(0, size) for size in shape[1:]]
    if preprocessing.crop == "nonzero":
        found = find_stored_foreground(channels, blocks, background)
    box: Any = tuple(
        (shape[1 + axis] - found[axis][1], shape[1 + axis] - found[axis][0])
        if flip
        else found[axis]
        for axis, flip in zip(axes, flips, strict=True)
    )
    file_shape: Any = shape[1:]
    old_mm, cropped = get_spacing(affine, axes), [stop - start for start, stop in box]
    new_mm = preprocessing.spacing_mm or old_mm
    grid = FileGrid(
        file_shape=file_shape,
        axes=axes,
        flips=flips,
        box=box,
        shape=compute_resampled_shape(cropped, old_mm, new_mm),
    )
    part = grid
    if region is not None:  # before the scan is measured
        context = [ceil(n * new / old) for n, new, old in zip(margin, new_mm, old_mm, strict=True)]
        box = tuple(find_region(grid, region, context))
        cropped = [stop - start for start, stop in box]
        part = replace(grid, box=box, shape=compute_resampled_shape(cropped, old_mm, new_mm))
    normalize = preprocessing.list_methods(shape[0])
    measured, percentiles = measure_stored(channels, blocks, grid, normalize, background)
    for c, method in enumerate(normalize):
        if method == "ct":
            assert preprocessing.intensities is not None
            measured[c] = preprocessing.intensities[c]
    statistics = describe_scan(channels, grid, affine, percentiles).statistics  # of the whole scan
    image = RegionImage(
        channels=channels,
        grid=part,
        orders=choose_interpolation_orders(old_mm, new_mm, 3),
        normalize=normalize,
        background=background,
        intensities=measured,
    )
    return replace(describe_scan(image, part, affine, percentiles), statistics=statistics)


def find_region(grid: FileGrid, region: Spans, context: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the span of a region of the file, with its context, along each axis within the box."""
    for axis, flip, (low, high), more in zip(grid.axes, grid.flips, grid.box, context, strict=True):
        start, stop = region[axis]
        if flip:
            start, stop = grid.file_shape[axis] - stop, grid.file_shape[axis] - start
        if start >= high or stop <= low:
            raise UsageError(f"region={list(chain(*region))} holds background only")
        yield max(low, start - more), min(high, stop + more)


def find_stored_background(
    channels: StoredChannels, background: Sequence[float | str]
) -> list[float]:
    """Return the value of each channel; AUTO gives 0 if the border is not constant."""
    faces: list[np.ndarray] = []
    for axis, size in enumerate(channels.shape[1:] if AUTO in background else ()):
        for start in (0, size - 1):
            box = [slice(None)] * 3
            box[axis] = slice(start, start + 1)
            faces.append(channels.read(box).squeeze(1 + axis))
    by_channel = [[face[c] for face in faces] for c in range(channels.shape[0])]
    return choose_background_values(background, by_channel)


def find_stored_foreground(
    channels: StoredChannels, blocks: Sequence[Sequence[slice]], background: Sequence[float]
) -> list[tuple[int, int]]:
    """Return the span of the foreground along each axis of the file; without one, all."""
    occupied = [np.zeros(size, bool) for size in channels.shape[1:]]
    for block in blocks:
        part = channels.read(block)
        foreground = np.zeros(part.shape[1:], bool)
        for channel, value in zip(part, background, strict=True):
            foreground |= channel != value
        for axis, side in enumerate(block):
            others = tuple(a for a in range(3) if a != axis)
            occupied[axis][side] |= foreground.any(others)
    rows = [np.flatnonzero(found) for found in occupied]
    return [
        (int(found[0]), int(found[-1]) + 1) if len(found) else (0, size)
        for found, size in zip(rows, channels.shape[1:], strict=True)
    ]


def measure_stored(
    channels: StoredChannels,
    blocks: Sequence[Sequence[slice]],
    grid: FileGrid,
    normalize: Sequence[str],
    background: Sequence[float],
) -> tuple[list[Intensity], tuple[tuple[float, ...], ...]]:
    """Return each channel's intensities within the box, and percentiles of a sample."""
    cropped = [stop - start for start, stop in grid.box]
    inside = grid.locate([(0, size) for size in cropped])
    step = ceil((np.prod(cropped, dtype=float) / MAX_VOXELS) ** (1 / 3))
    sampled = [np.zeros(size, bool) for size in channels.shape[1:]]
    for axis, flip in zip(grid.axes, grid.flips, strict=True):
        sampled[axis][inside[axis]][:: -step if flip else step] = True
    moments = [(Moments(), Moments()) for _ in normalize]  # of all voxels, and of the foreground
    samples: list[list[np.ndarray]] = [[] for _ in normalize]
    for block in blocks:
        sides = [
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(block, inside, strict=True)
        ]
        if any(side.start >= side.stop for side in sides):
            continue
        chosen = np.ix_(*(marks[side] for marks, side in zip(sampled, sides, strict=True)))
        for c, channel in enumerate(channels.read(sides)):
            samples[c].append(channel[chosen].ravel())
            if normalize[c] in ("zscore", "zscore_nonzero", "rescale_to_0_1"):
                values = channel.astype(np.float32)
                moments[c][0].add(values)
                if normalize[c] == "zscore_nonzero":
                    moments[c][1].add(values[values != np.float32(background[c])])
    percentiles = (measure_percentiles(np.concatenate(s)[:, None, None]) for s in samples)
    chosen_moments = [nonzero if nonzero.count else whole for whole, nonzero in moments]
    return [found.intensity for found in chosen_moments], tuple(percentiles)
