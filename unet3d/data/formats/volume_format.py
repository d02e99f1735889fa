"""What every format of volumes has: a header, voxels, labels to write."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from unet3d.errors import UsageError, describe_os_error

NOT_2D = "2D images are not supported"
FIX_2D = "stack the slices of each scan into one volume"

LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""From the patient axes of DICOM and ITK to those of NIfTI and of every affine here."""

SLAB = 2**20
"""Voxels of an array that are converted at a time, about."""


class UnreadableFileError(ValueError):
    """A file cannot be read as a volume; the message continues a sentence about the file."""


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
    may_be_cropped: bool = False  # it may hold only a part of its image's grid
    buffer_bytes: int = 0  # held while reading, besides the array

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """Return the voxel sizes that the affine gives."""
        x, y, z = np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0)).tolist()
        return x, y, z

    @property
    def is_straight(self) -> bool:
        """Return whether axes are neither turned nor flipped."""
        return np.array_equal(self.affine[:3, :3], np.diag(self.spacing_mm))

    @property
    def num_channels(self) -> int:
        """Return the number of 3D volumes in the file."""
        return prod(self.shape[3:])

    @property
    def reading_bytes(self) -> int:
        """Return the RAM that reading all voxels takes."""
        return prod(self.shape) * self.dtype.itemsize + self.buffer_bytes


class VolumeFormat(Protocol):
    """Files of one format, which exist where they are read.

    Errors are UnreadableFileError, or UsageError that names the file.
    """

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    def list_files(self, file: Path) -> list[Path]:
        """Return the files that hold the volume; all but the first may be missing."""
        ...

    def read_header(self, file: Path) -> VolumeHeader:
        """Read the header without decoding any voxel."""
        ...

    def read_volume(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Return (channels (C, D, H, W), affine)."""
        ...

    def check_target(self, path: Path, like: Path, grid: VolumeHeader) -> None:
        """Refuse to write labels to `path` if it cannot hold the grid of `like`."""
        ...

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, grid: VolumeHeader, classes: Sequence[str]
    ) -> None:
        """Write labels (D, H, W), uint8, on the grid of the volume `like`, atomically."""
        ...


@contextmanager
def describe_read_errors() -> Generator[None]:
    """Turn the errors of a library that reads a file into UnreadableFileError."""
    try:
        yield
    except (UnreadableFileError, UsageError):
        raise
    except OSError as error:
        reason = " ".join(describe_os_error(error).split())
        raise UnreadableFileError(f"cannot be read: {reason}") from error
    except Exception as error:  # damaged files raise anything
        *_, reason = (str(error).strip() or type(error).__name__).splitlines()
        raise UnreadableFileError(f"cannot be decoded: {reason.strip()}") from error


def require_target(can_hold: bool, path: Path, what: str, like: Path) -> None:
    """Refuse to write a file whose format cannot hold what the volume `like` has."""
    if not can_hold:
        raise UsageError(
            f"{path} cannot hold the {what} of {like}: write another format, such as "
            "output_format=nii.gz"
        )


def iter_slabs(channel: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the float32 values of (D, H, W) in pieces of about SLAB voxels, first axis fastest."""
    planes = channel.T
    step = max(1, SLAB // planes[0].size)
    for start in range(0, len(planes), step):
        with np.errstate(over="ignore"):  # values beyond float32 become infinite
            yield planes[start : start + step].astype(np.float32).ravel()


def get_number_type(dtype: np.dtype) -> np.dtype:
    """Return the type of voxels as numbers: masks of true and false become bytes."""
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype
