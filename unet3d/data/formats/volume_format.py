"""What every format of volumes has: a header, voxels, labels to write."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from unet3d.errors import UsageError
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


@dataclass(frozen=True, kw_only=True)
class VolumeHeader(Grid):
    """What a file says of its voxels."""

    dtype: np.dtype
    assumption: str | None = None  # what the file does not say of its spacing
    has_orientation: bool = True  # or that of the affine is assumed
    may_be_cropped: bool = False  # it may hold only a part of its image's grid
    buffer_bytes: int = 0  # held while reading, besides the array

    @property
    def spacing_mm(self) -> FloatTriple:
        """Return the voxel sizes that the affine gives."""
        return tuple(np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0)).tolist())

    @property
    def orientation(self) -> str:
        """Return the orientation of the axes, such as LPS."""
        from nibabel.orientations import aff2axcodes

        return "".join(map(str, aff2axcodes(self.affine)))

    @property
    def num_channels(self) -> int:
        return prod(self.shape[3:])

    @property
    def reading_bytes(self) -> int:
        """Return the RAM that reading all voxels takes."""
        return prod(self.shape) * self.dtype.itemsize + self.buffer_bytes


class VolumeFormat(Protocol):
    """Files of one format, by one library, which is imported when it is needed."""

    name: str
    suffixes: tuple[str, ...]
    packages: tuple[str, ...] = ()  # optional ones, as pip calls them; the first is imported
    cannot_hold: tuple[str, ...] = ()  # what labels on some grids would lose
    is_folder: bool = False  # whether labels are written to a folder

    def list_files(self, file: Path) -> list[Path]:
        """Return the files that hold the volume; all but the first may be missing."""
        return [file]

    def read_header(self, file: Path) -> VolumeHeader:
        """Read the header of an existing file without decoding any voxel; any error may rise."""
        ...

    def read_voxels(self, file: Path, header: VolumeHeader) -> np.ndarray:
        """Return (C, D, H, W) on the grid of the header; any error may rise."""
        ...

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, grid: VolumeHeader, classes: Sequence[str]
    ) -> None:
        """Write labels (D, H, W) on the grid of the volume `like` to a new file or folder.

        `classes` are the names of the labels 0, 1, 2, ...
        """
        ...


def iter_slabs(channels: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the float32 values of (C, D, H, W), about SLAB of them at a time, W slowest."""
    for channel in channels:
        planes = channel.T
        step = max(1, SLAB // planes[0].size)
        for start in range(0, len(planes), step):
            with np.errstate(over="ignore"):  # values beyond float32 become infinite
                yield planes[start : start + step].astype(np.float32).ravel()


def get_number_type(dtype: np.dtype) -> np.dtype:
    """Return the type of voxels as numbers: masks of true and false become bytes."""
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype
