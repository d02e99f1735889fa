"""What every format of volumes has: a header, voxels, labels to write."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from unet3d.errors import UsageError
from unet3d.text import join_first
from unet3d.types import FloatTriple

LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""From the patient axes of DICOM and ITK to those of NIfTI and of every affine here."""

MM_PER_UNIT: dict[str, float] = {
    unit: mm
    for units, mm in (
        ("angstrom", 1e-7),
        ("nm nanometer nanometers", 1e-6),
        ("um \u00b5m \u03bcm \\u00B5m micron microns micrometer micrometers", 1e-3),
        ("mm millimeter millimeters", 1.0),
        ("cm centimeter centimeters", 10.0),
        ("in inch", 25.4),
        ("m meter", 1000.0),
    )
    for unit in units.split()
}
"""Units of OME and ImageJ."""

NO_SPACING = "no voxel spacing: 1 mm is assumed"

SLAB = 2**20  # voxels of an array that are converted at a time, about

CHUNK = 64  # voxels along each axis of the chunks that are written


class UnreadableFileError(UsageError):
    """A file cannot be read as a volume; `problem` continues a sentence about the file."""

    def __init__(self, problem: str, file: Path | None = None):  # formats leave the file out
        self.problem = problem
        text = f"{file} cannot be read as a volume: it {problem}"
        if file is not None and problem == "is missing":
            text = f"{file.absolute()} is missing"
        super().__init__(text)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Voxels in space."""

    shape: tuple[int, ...]  # (D, H, W), or (D, H, W, C)
    affine: np.ndarray  # (4, 4), voxels -> mm; the axes point right, forward and up

    @property
    def orientation(self) -> str:
        """Return the orientation of the axes, such as LPS."""
        from nibabel.orientations import aff2axcodes

        return "".join(map(str, aff2axcodes(self.affine)))


@dataclass(frozen=True, kw_only=True)
class VolumeHeader(Grid):
    """What a file says of its voxels."""

    dtype: np.dtype
    assumption: str | None = None  # what the file does not say of its spacing
    has_orientation: bool = True  # or that of the affine is assumed
    may_be_cropped: bool = False  # it may hold only a part of its image's grid
    buffer_bytes: int = 0  # held while reading, besides the array
    label_names: tuple[tuple[int, str], ...] = ()  # what the file calls its labels

    @property
    def spacing_mm(self) -> FloatTriple:
        """Return the voxel sizes that the affine gives."""
        return tuple(np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0)).tolist())

    @property
    def num_channels(self) -> int:
        return prod(self.shape[3:])

    @property
    def reading_bytes(self) -> int:
        """Return the RAM that reading all voxels takes."""
        return prod(self.shape) * self.dtype.itemsize + self.buffer_bytes


def find_other_name(
    header: VolumeHeader, known: dict[str, tuple[int, ...]], source: str
) -> str | None:
    """Return how a file names a label as `source` names another; continues a sentence.

    Names that are not known are added. A file may have several labels of one name.
    """
    own: dict[str, tuple[int, ...]] = {}
    for value, name in header.label_names:
        key = name.strip().casefold()
        own[key] = (*own.get(key, ()), value)
    for value, name in header.label_names:
        key = name.strip().casefold()
        labels = known.setdefault(key, own[key])
        if value not in labels:
            others = join_first([str(label) for label in labels])
            return f"calls label {value} {name}, which is {others} in {source}"
    return None


@dataclass(frozen=True)
class StoredVoxels:
    """Voxels (C, D, H, W) that stay in their file; `array` has its axes in another order."""

    array: Any  # is sliced, as those of numpy and zarr are
    axes: str = "cxyz"  # of the array; those that are not c, x, y or z have one plane

    @property
    def shape(self) -> tuple[int, ...]:
        size = dict(zip(self.axes, self.array.shape, strict=True))
        return tuple(size.get(axis, 1) for axis in "cxyz")

    @property
    def chunks(self) -> tuple[int, ...]:
        """Return the shape of the parts that are stored together."""
        chunks = getattr(self.array, "shards", None) or getattr(self.array, "chunks", None)
        if chunks is None:  # the slowest axis that is not c, of a memory map or of an HDF5 file
            ndim = len(self.axes)
            order = np.argsort(getattr(self.array, "strides", range(ndim, 0, -1)))[::-1]
            slowest = next(n for n in order if self.axes[n] != "c")
            chunks = [1 if n == slowest else size for n, size in enumerate(self.array.shape)]
        size = dict(zip(self.axes, chunks, strict=True))
        return tuple(size.get(axis, 1) for axis in "cxyz")

    def read(self, box: Sequence[slice]) -> np.ndarray:
        """Return the channels (C, d, h, w) of a box."""
        spans = dict(zip("cxyz", (slice(None), *box), strict=True))
        part = np.asarray(self.array[tuple(spans.get(axis, 0) for axis in self.axes)])
        axes = "".join(axis for axis in self.axes if axis in spans)
        if "c" not in axes:
            axes, part = "c" + axes, part[None]
        return part.transpose([axes.index(axis) for axis in "cxyz"])


class VolumeFormat(Protocol):
    """Files of one format, by one library, which is imported when it is needed."""

    name: str
    suffixes: tuple[str, ...]
    packages: tuple[str, ...] = ()  # optional ones, as pip calls them; the first is imported
    names_axes: bool = True  # files may say which axis is left-right, and so on
    cannot_hold: tuple[str, ...] = ()  # what labels on some grids would lose
    is_folder: bool = False  # whether labels are written to a folder
    writes_parts: bool = False  # whether labels need not be written at once

    def list_files(self, file: Path) -> list[Path]:
        """Return the files that hold the volume; all but the first may be missing."""
        return [file]

    def read_header(self, file: Path) -> VolumeHeader:
        """Read the header of an existing file without decoding any voxel; any error may rise."""
        ...

    def read_voxels(self, file: Path, header: VolumeHeader) -> np.ndarray:
        """Return (C, D, H, W) on the grid of the header; any error may rise."""
        voxels = self.open_voxels(file, header)
        assert voxels is not None, "a format that is read whole has its own read_voxels"
        return voxels.read([slice(None)] * 3).view(header.dtype)

    def open_voxels(self, file: Path, header: VolumeHeader) -> "StoredVoxels | None":
        """Return voxels of which only what is indexed is read; None: the file is read whole."""
        return None

    def create_labels(
        self, path: Path, dtype: Any, like: Path, grid: VolumeHeader, channels: int | None = None
    ) -> Any:
        """Create labels of zeros, with `channels` a volume for each.

        What is assigned to boxes (..., D, H, W) of the result is written.
        """
        return None  # unless it writes parts

    def open_labels(self, path: Path) -> Any:
        """Open labels that `create_labels` has created, to write more."""
        return None

    def finish_labels(self, path: Path) -> None:
        """Add what follows from all labels that were written to the result of `create_labels`."""
        return None

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, grid: VolumeHeader, classes: Sequence[str]
    ) -> None:
        """Write labels (D, H, W) on the grid of the volume `like` to a new file or folder.

        `classes` are the names of the labels 0, 1, 2, ...
        """
        self.create_labels(path, labels.dtype, like, grid)[(slice(None),) * 3] = labels
        self.finish_labels(path)


def iter_slabs(channels: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the float32 values of (C, D, H, W), about SLAB of them at a time, W slowest."""
    for channel in channels:
        planes = channel.T
        step = max(1, SLAB // planes[0].size)
        for start in range(0, len(planes), step):
            with np.errstate(over="ignore"):  # values beyond float32 become infinite
                yield planes[start : start + step].astype(np.float32).ravel()


def iter_boxes(
    shape: Sequence[int], chunks: Sequence[int], voxels: int
) -> Iterator[tuple[slice, ...]]:
    """Yield boxes of a volume: whole chunks, at least one, with at most this number of voxels.

    >>> [[(s.start, s.stop) for s in box] for box in iter_boxes((2, 4, 5), (2, 4, 2), 16)]
    [[(0, 2), (0, 4), (0, 2)], [(0, 2), (0, 4), (2, 4)], [(0, 2), (0, 4), (4, 5)]]
    >>> [[(s.start, s.stop) for s in box] for box in iter_boxes((2, 5), (1, 1), 3)]
    [[(0, 1), (0, 3)], [(0, 1), (3, 5)], [(1, 2), (0, 3)], [(1, 2), (3, 5)]]
    """
    sides = [min(size, chunk) for size, chunk in zip(shape, chunks, strict=True)]
    for axis in reversed(range(len(shape))):
        count = max(1, voxels // prod(sides))
        sides[axis] = min(shape[axis], sides[axis] * count)
    starts = (range(0, size, side) for size, side in zip(shape, sides, strict=True))
    for corner in product(*starts):
        yield tuple(
            slice(start, min(start + side, size))
            for start, side, size in zip(corner, sides, shape, strict=True)
        )


def get_number_type(dtype: np.dtype) -> np.dtype:
    """Return the type of voxels as numbers: masks of true and false become bytes."""
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype
