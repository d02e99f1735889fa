"""Find the format of a file by its name, and read or write it with errors that name the file."""

import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np

from unet3d.data.formats.dicom import Dicom, is_series
from unet3d.data.formats.hdf5 import Hdf5, split_array
from unet3d.data.formats.itk import Itk
from unet3d.data.formats.nifti import Nifti
from unet3d.data.formats.numpy_file import NumPy
from unet3d.data.formats.ome_zarr import OmeZarr, is_group, is_within_zarr
from unet3d.data.formats.tiff import Tiff
from unet3d.data.formats.volume_format import (
    NO_SPACING,
    Grid,
    StoredVoxels,
    UnreadableFileError,
    VolumeFormat,
    VolumeHeader,
)
from unet3d.data.preprocessing.channels import find_orientation, reorient
from unet3d.errors import UsageError, describe_os_error, explain_missing_packages
from unet3d.files import atomic_write, create_folder
from unet3d.text import join_first, pluralize
from unet3d.types import Triple

DICOM = Dicom()
FORMATS: tuple[VolumeFormat, ...] = (
    Nifti(),
    Itk("NRRD", ".nrrd"),
    Itk("MetaImage", ".mha", ".mhd"),
    Tiff(),
    OmeZarr(),
    Hdf5(),
    NumPy(),
    DICOM,
)
SUFFIXES = tuple(suffix for format in FORMATS for suffix in format.suffixes)
SUFFIX_LIST = (
    ", ".join(s for s in SUFFIXES[:-1] if not s.startswith(".ome")) + f" or {SUFFIXES[-1]}"
)

SEG_SUFFIX = ".dcm"  # ending of the labels of a folder of DICOM images, which has none

NOT_2D = "2D images are not supported"
FIX_2D = "stack the slices of each scan into one volume"

OUTPUT_FORMATS = {name: f".{name}" for name in ("nii.gz", "nii", "nrrd", "mha", "tif", "h5", "npy")}
OUTPUT_FORMATS |= {"zarr": ".ome.zarr", "seg": SEG_SUFFIX}
"""Endings of labels by name."""

MAX_LABEL = 2**16 - 1
MAX_SHEAR = 5  # tolerated degrees between two axes beyond or below 90
MAX_TILT = 0.5  # degrees from which that changes distances, and what a DICOM SEG is read as
TOLERANCE = 1e-2  # tolerated distance in voxels between the corners of two grids
ORTHOGONAL = 5e-3  # degrees that SimpleITK tolerates


def is_volume(path: Path) -> bool:
    """Return whether a name is that of a volume and not hidden, or a folder one by its files."""
    name = split_array(path)[0].name
    is_folder = is_group(path) or is_series(path)
    return not name.startswith(".") and (name.endswith(SUFFIXES) or is_folder)


def list_volumes(folder: Path) -> list[Path]:
    """Return a folder's volumes sorted by name; an empty list if the folder is missing."""
    return sorted(path for path in folder.glob("*") if is_volume(path))


def list_files_by_name(folder: Path) -> dict[str, list[Path]]:
    """Return a folder's volumes by name without suffix."""
    files: dict[str, list[Path]] = {}
    for file in list_volumes(folder):
        files.setdefault(split_suffix(file)[0], []).append(file)
    return files


def split_suffix(path: Path) -> tuple[str, str]:
    """Return a volume's name without and its suffix, which may be empty.

    >>> split_suffix(Path("scans/case.1.nii.gz"))
    ('case.1', '.nii.gz')
    """
    name = split_array(path)[0].name
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix), suffix


def find_format(path: Path) -> VolumeFormat:
    """Return the format of a file or folder, which may be missing."""
    name = split_array(path)[0].name
    for format in FORMATS:
        if name.endswith(format.suffixes):
            return format
    if is_within_zarr(path):
        return OmeZarr()
    if is_series(path):
        return DICOM
    reason = f"is not named {SUFFIX_LIST}, nor a folder of DICOM images"
    raise UnreadableFileError(reason + advise_conversion(path.name), path)


def advise_conversion(name: str) -> str:
    """Return how a file of another format is converted, as the end of a message, or nothing."""
    stem, _, suffix = name.rpartition(".")
    if suffix.lower() in ("mgz", "mgh", "img", "hdr"):
        return f"; convert it by nibabel's command: nib-convert {name} {stem}.nii.gz"
    return ""


def describe_nested_series(folder: Path) -> str:
    """Say where DICOM images are below a folder, as the end of a message, or nothing."""
    series = sorted(path for path in folder.glob("**/") if path != folder and is_series(path))
    if not series:
        return ""
    listed = join_first([path.relative_to(folder).as_posix() for path in series], 3)
    return (
        f"; DICOM images are in {pluralize(len(series), 'folder')} below ({listed}): give one of "
        f"them, or link all into one folder, as in ln -s {series[0].absolute()} FOLDER/NAME"
    )


@contextmanager
def open_format(path: Path) -> Generator[VolumeFormat]:
    """Yield the format of a file that can be read; errors in the body name the file in one line."""
    file, _ = split_array(path)
    try:
        if not file.exists():
            raise UnreadableFileError("is missing")
        if file.is_file() and not file.stat().st_size:
            raise UnreadableFileError("is empty")
        format = find_format(path)
        import_packages(format, path)
        yield format
    except UnreadableFileError as error:
        raise UnreadableFileError(error.problem, path) from error
    except UsageError:
        raise
    except OSError as error:
        reason = " ".join(describe_os_error(error).split())
        raise UnreadableFileError(f"cannot be read: {reason}", path) from error
    except Exception as error:  # damaged files raise anything
        *_, reason = (str(error).strip() or type(error).__name__).splitlines()
        raise UnreadableFileError(f"cannot be decoded: {reason.strip()}", path) from error


def import_packages(format: VolumeFormat, path: Path) -> None:
    """Import the library of a format; say what to install for `path` where it is missing."""
    with explain_missing_packages(path, *format.packages):
        for package in format.packages[:1]:
            import_module(package)


def list_files(path: Path) -> list[Path]:
    """Return the files that hold a volume."""
    with open_format(path) as format:
        return format.list_files(path)


def read_header(path: Path, grid: Grid | None = None) -> VolumeHeader:
    """Read the header of a 3D volume, with or without channels, without decoding any voxel.

    With the `grid` of an image, that of labels as `read_volume` puts them on it.
    """
    with open_format(path) as format:
        header = format.read_header(path)
        shape = header.shape
        while len(shape) > 3 and shape[-1] == 1:
            shape = shape[:-1]
        if len(shape) not in (3, 4) or min(shape) < 1:
            reason = f"; {NOT_2D}: {FIX_2D}" if len(shape) == 2 else ""
            size = " x ".join(map(str, shape))
            raise UnreadableFileError(
                f"has shape {size}: it must be 3D, or 4D with the channels last{reason}"
            )
        if (shear := measure_shear(header)) > MAX_SHEAR:
            raise UnreadableFileError(
                f"has axes {90 - shear:.3g} instead of 90 degrees apart, as with a tilted gantry; "
                "resample it onto a grid with orthogonal axes, as dcm2niix does"
            )
    header = replace(header, shape=shape)
    if grid is None:
        return header
    header, _ = turn_to_grid(header, grid)
    if not header.may_be_cropped or find_offset(header, grid) is None:
        return header
    return replace(header, shape=grid.shape[:3], affine=grid.affine)


def read_volume(path: Path, grid: Grid | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return (channels (C, D, H, W), affine); integers that need no scaling stay integers.

    Labels are put on the `grid` of their image if they are on it but for the order and direction of
    their axes, or say nothing of their spacing, or if they may hold a part of it.
    """
    header = read_header(path)
    with open_format(path) as format:
        channels = format.read_voxels(path, header)
    if grid is None:
        return channels, header.affine
    header, (axes, flips) = turn_to_grid(header, grid)
    channels = reorient(channels, axes, flips)
    if not header.may_be_cropped or header.shape[:3] == grid.shape[:3]:
        return channels, header.affine
    offset = find_offset(header, grid)
    if offset is None:
        return channels, header.affine
    result = np.zeros((len(channels), *grid.shape[2::-1]), channels.dtype).transpose(0, 3, 2, 1)
    spans = zip(offset, channels.shape[1:], strict=True)
    result[(slice(None), *(slice(start, start + n) for start, n in spans))] = channels
    return result, grid.affine


def open_voxels(path: Path) -> StoredVoxels | None:
    """Return voxels of which only what is indexed is read; None: the file is read whole."""
    header = read_header(path)
    with open_format(path) as format:
        return format.open_voxels(path, header)


def measure_shear(header: VolumeHeader) -> float:
    """Return by how many degrees two axes differ at most from a right angle."""
    with np.errstate(invalid="ignore"):  # of an affine that is refused elsewhere
        axes = header.affine[:3, :3] / header.spacing_mm
    cosine = np.abs(axes.T @ axes - np.eye(3)).max()
    return float(np.degrees(np.arcsin(cosine.clip(max=1))))


def turn_to_grid(
    header: VolumeHeader, grid: Grid
) -> tuple[VolumeHeader, tuple[Triple, Sequence[bool]]]:
    """Return the header of labels with the axes of their image, and how these are found.

    Labels that do not say their spacing have that of an image of their size. Where the labels would
    be elsewhere than the image, nothing changes.
    """
    as_it_is = header, ((0, 1, 2), (False, False, False))
    for affine in (header.affine, grid.affine):
        if not np.isfinite(affine).all() or not np.linalg.det(affine[:3, :3]):
            return as_it_is
    if header.assumption == NO_SPACING and header.shape[:3] == grid.shape[:3]:
        return replace(header, affine=grid.affine, assumption=None), as_it_is[1]
    axes, flips = find_orientation(header.affine, grid.orientation)
    to_file = np.zeros((4, 4))
    to_file[3, 3] = 1
    for n, (axis, flip) in enumerate(zip(axes, flips, strict=True)):
        to_file[axis, [n, 3]] = (-1, header.shape[axis] - 1) if flip else (1, 0)
    turned = Grid(
        shape=tuple(header.shape[axis] for axis in axes) + header.shape[3:],
        affine=header.affine @ to_file,
    )
    if turned.shape[:3] != grid.shape[:3] or find_offset(turned, grid) != (0, 0, 0):
        return as_it_is
    return replace(header, shape=turned.shape, affine=turned.affine), (axes, flips)


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
    return tuple(offset.astype(int).tolist())


def read_labels(file: Path, grid: Grid | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return labels (D, H, W), uint8 if they fit and else int32, and their affine (4, 4)."""
    channels, affine = read_volume(file, grid)
    if len(channels) != 1 or channels.dtype.kind not in "iuf":
        raise UsageError(
            f"{file} must hold one real number per voxel, but holds {len(channels)} of type "
            f"{channels.dtype}"
        )
    if not np.isfinite(affine).all() or not np.linalg.det(affine[:3, :3]):
        raise UsageError(f"{file}: its affine is singular or not finite: {affine[:3].tolist()}")
    values = channels[0]
    if values.dtype.kind == "f":
        for plane in np.moveaxis(values, -1, 0):
            fractional = plane[plane != np.rint(plane)]  # includes NaN, which is unequal to itself
            if len(fractional):
                raise UsageError(f"{file}: labels must be integers, found {fractional[0]!s}")
    low, high = values.min(), values.max()
    if low < -MAX_LABEL or high > MAX_LABEL:
        label = low if low < -MAX_LABEL else high
        raise UsageError(
            f"{file}: labels must be within -{MAX_LABEL}..{MAX_LABEL}, found {label:g}"
        )
    return values.astype(np.uint8 if low >= 0 and high < 256 else np.int32, copy=False), affine


def read_label_pair(
    first: Path, second: Path
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the labels and affine of two files, on the grid of the first where they have one.

    A SEG may hold a part of the other's grid.
    """
    labels, affine = read_labels(first, read_header(second, read_header(first)))
    return (labels, affine), read_labels(second, Grid(shape=labels.shape, affine=affine))


def to_label_values(labels: np.ndarray, values: Sequence[int] | None) -> np.ndarray:
    """Return the value of each class of `labels` in files, uint8 if all fit and else uint16."""
    if values is None:
        return labels if labels.dtype == np.uint8 else labels.astype(np.uint16)
    return np.array(values, np.uint8 if max(values) < 256 else np.uint16)[labels]


def describe_mixed_axes(file: Path, other: Path) -> str | None:
    """Say which order of axes two files have, if one may be the other transposed."""
    if (file.suffix == ".npy") == (other.suffix == ".npy"):
        return None
    array, stack = (file, other) if file.suffix == ".npy" else (other, file)
    try:
        format = find_format(stack)
    except UnreadableFileError:
        return None
    if format.names_axes:
        return None
    return (
        f"{array.name} is read as x, y, z, but arrays in {format.name}, such as {stack.name}, as "
        "z, y, x"
    )


def check_target(path: Path, like: Path) -> VolumeHeader:
    """Return the header of the volume `like`; refuse a `path` whose format cannot hold its grid."""
    grid, format = read_header(like), find_format(path)
    import_packages(format, path)
    if format is DICOM and find_format(like) is not DICOM:
        raise UsageError(
            f"{path} would be a DICOM SEG, which refers to DICOM images, and {like} is none: "
            "set output_format=nii.gz"
        )
    losses = {
        "skewed axes": measure_shear(grid) > ORTHOGONAL,
        "tilted slices": measure_shear(grid) > MAX_TILT,
        "orientation": not np.array_equal(grid.affine[:3, :3], np.diag(grid.spacing_mm)),
        "position": grid.affine[:3, 3].any(),
    }
    for what in format.cannot_hold:
        if losses[what]:
            raise UsageError(
                f"{path} cannot hold the {what} of {like}: write another format, such as .nii.gz "
                "(for a folder: output_format=nii.gz)"
            )
    return grid


def write_labels(
    path: Path,
    labels: np.ndarray,
    like: Path,
    classes: Sequence[str] = (),
    values: Sequence[int] | None = None,
) -> None:
    """Write labels (D, H, W) in the format of `path`, on the grid of the volume `like`.

    Class n has the value `values[n]`, but in a DICOM SEG, whose segments are numbered.
    """
    grid, format = check_target(path, like), find_format(path)
    labels = to_label_values(labels, None if format is DICOM else values)
    with (create_folder if format.is_folder else atomic_write)(path) as draft:
        format.write_labels(draft, labels, like, grid, classes)
        if format.is_folder and path.exists():  # a folder cannot be replaced
            shutil.rmtree(path)
