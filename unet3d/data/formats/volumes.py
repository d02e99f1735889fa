"""Find the format of a file by its name, and read or write it with errors that name the file."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from unet3d.data.formats.dicom import Dicom
from unet3d.data.formats.dicom_series import is_series
from unet3d.data.formats.itk import Itk
from unet3d.data.formats.nifti import Nifti
from unet3d.data.formats.numpy_file import NumPy
from unet3d.data.formats.ome_zarr import OmeZarr
from unet3d.data.formats.tiff import Tiff
from unet3d.data.formats.volume_format import (
    FIX_2D,
    NOT_2D,
    Grid,
    UnreadableFileError,
    VolumeFormat,
    VolumeHeader,
)
from unet3d.errors import UsageError
from unet3d.types import Triple

SEG_SUFFIX = ".dcm"
"""Ending of the labels of a folder of DICOM images, which has none."""

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
"""Endings of 2D images, which users of other tools have."""

OUTPUT_FORMATS = {
    "nii.gz": ".nii.gz",
    "nii": ".nii",
    "nrrd": ".nrrd",
    "mha": ".mha",
    "tif": ".tif",
    "zarr": ".ome.zarr",
    "npy": ".npy",
    "seg": SEG_SUFFIX,
}
"""Endings of labels by name."""

TOLERANCE = 1e-2
"""Tolerated distance in voxels between the corners of two grids."""


def is_volume(path: Path) -> bool:
    """Return whether a name is that of a volume and not hidden, or a folder a DICOM series."""
    if path.name.startswith("."):
        return False
    return path.name.endswith(SUFFIXES) or is_series(path)


def list_volumes(folder: Path) -> list[Path]:
    """Return a folder's volumes sorted by name; an empty list if the folder is missing."""
    return sorted(path for path in folder.glob("*") if is_volume(path))


def describe_other(path: Path) -> str:
    """Return why a path is not a volume."""
    if path.is_symlink() and not path.exists():
        return "is a link that leads nowhere"
    if path.is_dir():
        return "is a folder without DICOM images"
    return f"is not named {SUFFIX_LIST}{describe_pictures([path.name])}"


def describe_pictures(names: Iterable[str]) -> str:
    """Return the end of an error if these are names of pictures, else nothing.

    >>> describe_pictures(["scan.PNG"])
    '; 2D images are not supported: stack the slices of each scan into one volume'
    """
    is_picture = any(name.lower().endswith(PICTURE_SUFFIXES) for name in names)
    return f"; {NOT_2D}: {FIX_2D}" if is_picture else ""


def split_suffix(path: Path) -> tuple[str, str]:
    """Return a volume's name without and its suffix, which may be empty.

    >>> split_suffix(Path("scans/case.1.nii.gz"))
    ('case.1', '.nii.gz')
    """
    suffix = next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), "")
    return path.name.removesuffix(suffix), suffix


def get_label_suffix(path: Path) -> str:
    """Return the suffix that the labels of a volume get."""
    suffix = split_suffix(path)[1]
    return {"": SEG_SUFFIX, ".mhd": ".mha"}.get(suffix, suffix)  # .mhd would be two files


def find_format(path: Path) -> VolumeFormat:
    """Return the format of a file or folder, which may be missing."""
    for format in FORMATS:
        if path.name.endswith(format.suffixes):
            return format
    if is_series(path):
        return DICOM
    raise UnreadableFileError(describe_other(path))


def find_existing_format(path: Path) -> VolumeFormat:
    """Return the format of a file or folder that can be read."""
    if not path.exists():
        raise UnreadableFileError("is missing")
    if path.is_file() and not path.stat().st_size:
        raise UnreadableFileError("is empty")
    return find_format(path)


def list_files(path: Path) -> list[Path]:
    """Return the files that hold a volume."""
    with _name_file(path):
        return find_existing_format(path).list_files(path)


def read_header(path: Path, grid: Grid | None = None) -> VolumeHeader:
    """Read a header without decoding any voxel; errors do not name the file.

    A volume that may hold a part of its image's grid gets `grid`, if it is a part of it.
    """
    header = find_existing_format(path).read_header(path)
    if grid is None or not header.may_be_cropped or find_offset(header, grid) is None:
        return header
    return replace(header, shape=grid.shape[:3], affine=grid.affine)


def open_header(path: Path) -> VolumeHeader:
    """Read the header of a 3D volume."""
    with _name_file(path):
        header = read_header(path)
    check_shape(path, header.shape)
    return header


def read_orientation(path: Path) -> str:
    """Return the orientation of a file's axes, such as LPS."""
    from nibabel.orientations import aff2axcodes

    return "".join(map(str, aff2axcodes(open_header(path).affine)))


def read_volume(path: Path, grid: Grid | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return (channels (C, D, H, W), affine); integers that need no scaling stay integers.

    A volume that may hold a part of its image's grid is put on `grid`, if it is a part of it.
    """
    with _name_file(path):
        format = find_existing_format(path)
        channels, affine = format.read_volume(path)
        check_shape(path, channels.shape[1:])
        if grid is None or channels.shape[1:4] == grid.shape[:3]:
            return channels, affine
        header = format.read_header(path)
    offset = find_offset(header, grid) if header.may_be_cropped else None
    if offset is None:
        return channels, affine
    return paste(channels, offset, grid.shape[:3]), grid.affine


def find_offset(part: Grid, grid: Grid) -> Triple | None:
    """Return the voxel of `grid` that is the first of `part`; None if it is not a part of the grid.

    >>> whole = Grid(shape=(4, 4, 4), affine=np.eye(4))
    >>> shifted = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 2], [0, 0, 0, 1.0]])
    >>> find_offset(Grid(shape=(4, 4, 2), affine=shifted), whole)
    (0, 0, 2)
    """
    if not np.linalg.det(grid.affine[:3, :3]):
        return None
    to_grid = np.linalg.solve(grid.affine, part.affine)
    size = np.array(part.shape[:3])
    offset = np.rint(to_grid[:3, 3])
    drift = np.abs((to_grid[:3, :3] - np.eye(3)) * (size - 1)).sum(axis=1)
    distance = drift + np.abs(to_grid[:3, 3] - offset)
    if distance.max() > TOLERANCE or offset.min() < 0 or (offset + size > grid.shape[:3]).any():
        return None
    d, h, w = (int(n) for n in offset)
    return d, h, w


def paste(channels: np.ndarray, offset: Triple, shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros of (C, *shape) with the channels at an offset."""
    result = np.zeros((len(channels), *shape[::-1]), channels.dtype).transpose(0, 3, 2, 1)
    slices = tuple(
        slice(start, start + n) for start, n in zip(offset, channels.shape[1:], strict=True)
    )
    result[(slice(None), *slices)] = channels
    return result


def check_target(path: Path, like: Path) -> None:
    """Refuse to write labels to `path` if its format cannot hold the grid of the volume `like`."""
    with _name_file(like):
        find_format(path).check_target(path, like, open_header(like))


def write_labels(path: Path, labels: np.ndarray, like: Path, classes: Sequence[str] = ()) -> None:
    """Write labels (D, H, W), uint8, in the format of `path`, on the grid of the volume `like`.

    `classes` are the names of the labels 0, 1, 2, ...
    """
    format, grid = find_format(path), open_header(like)
    format.check_target(path, like, grid)
    format.write_labels(path, labels, like, grid, classes)


def check_shape(path: Path, shape: Sequence[int]) -> None:
    """Refuse what is not a 3D volume, with or without channels."""
    if len(shape) not in (3, 4) or min(shape) < 1:
        reason = f"; {NOT_2D}: {FIX_2D}" if len(shape) == 2 else ""
        raise UsageError(f"{path} must be a 3D volume, but has shape {list(shape)}{reason}")


@contextmanager
def _name_file(path: Path) -> Generator[None]:
    try:
        yield
    except UnreadableFileError as error:
        if str(error) == "is missing":
            raise UsageError(f"{path.absolute()} is missing") from error
        raise UsageError(f"{path} cannot be read as a volume: it {error}") from error


DICOM = Dicom()
FORMATS: tuple[VolumeFormat, ...] = (
    Nifti(),
    Itk("NRRD", ".nrrd"),
    Itk("MetaImage", ".mha", ".mhd"),
    Tiff(),
    OmeZarr(),
    NumPy(),
    DICOM,
)
SUFFIXES = tuple(suffix for format in FORMATS for suffix in format.suffixes)
SUFFIX_LIST = (
    ", ".join(s for s in SUFFIXES[:-1] if not s.startswith(".ome")) + f" or {SUFFIXES[-1]}"
)
