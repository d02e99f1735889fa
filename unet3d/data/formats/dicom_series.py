"""A folder with one series of DICOM images, one slice each, by pydicom."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volume_format import (
    LPS_TO_RAS,
    UnreadableFileError,
    VolumeHeader,
    describe_read_errors,
)
from unet3d.errors import need_packages
from unet3d.text import join_first

TAGS = [
    *("SOPClassUID", "SeriesInstanceUID", "SeriesDescription", "Modality"),
    *("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "BitsAllocated"),
    *("PixelRepresentation", "RescaleSlope", "RescaleIntercept", "PixelSpacing"),
    *("SliceThickness", "ImageOrientationPatient", "ImagePositionPatient"),
]
"""What a header needs of each image."""

GAP_TOLERANCE = 0.02
"""Tolerated difference between distances of slices, as a fraction of them."""

MULTIFRAME = [
    f"1.2.840.10008.5.1.4.1.1.{number}"
    for number in ("2.1", "2.2", "4.1", "4.4", "66.4", "66.7", "128.1", "130")
]
"""Classes of files that hold a whole volume: enhanced images and segmentations."""

HEAD_BYTES = 512
"""Bytes at a file's start that name its class."""

MAX_TRIED = 16
"""Files of a folder that are opened to find out whether it holds a series."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """The images of a series in the order of their slices, without voxels."""

    files: list[Path]
    datasets: list[Any]
    affine: np.ndarray

    @property
    def scaling(self) -> list[tuple[float, float]]:
        """Return slope and intercept of each slice."""
        return [
            (float(d.get("RescaleSlope", 1)), float(d.get("RescaleIntercept", 0)))
            for d in self.datasets
        ]

    @property
    def header(self) -> VolumeHeader:
        """Return the header of the volume: float32 if any slice must be scaled."""
        first = self.datasets[0]
        with describe_read_errors():
            kind = "i" if first.get("PixelRepresentation") else "u"
            is_scaled = set(self.scaling) != {(1.0, 0.0)}
            return VolumeHeader(
                shape=(int(first.Columns), int(first.Rows), len(self.files)),
                affine=self.affine,
                dtype=np.dtype("f4" if is_scaled else f"{kind}{first.BitsAllocated // 8}"),
            )

    def read(self) -> np.ndarray:
        """Return (1, D, H, W), read slice by slice."""
        header = self.header
        volume = np.empty(header.shape[::-1], header.dtype)
        for index, (file, (slope, intercept)) in enumerate(
            zip(self.files, self.scaling, strict=True)
        ):
            with describe_read_errors(), np.errstate(over="ignore"):  # beyond float32: infinite
                plane = read_dataset(file).pixel_array
                volume[index] = plane * slope + intercept if header.dtype.kind == "f" else plane
        return volume.transpose(2, 1, 0)[None]


def is_series(path: Path) -> bool:
    """Return whether a path is a folder with DICOM images of one slice each."""
    if not path.is_dir():
        return False
    try:
        with os.scandir(path) as entries:
            names = sorted(e.name for e in entries if e.name[0] != "." and e.is_file())
        heads = (_read_head(path / name) for name in names[:MAX_TRIED])
        return any(head and not any(uid.encode() in head for uid in MULTIFRAME) for head in heads)
    except OSError:  # such as lost+found, which only root may read
        return False


def list_dicom_files(folder: Path) -> list[Path]:
    """Return the DICOM files of a folder, sorted by name."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name[0] != ".")
    return [file for file in files if file.name != "DICOMDIR" and _read_head(file) is not None]


def read_dataset(file: Path, **options: Any) -> Any:
    """Read a file; values that break the standard are read as they are."""
    with need_packages(file, "pydicom", "highdicom"):
        import pydicom
        from pydicom.config import IGNORE, settings

    settings.reading_validation_mode = IGNORE
    return pydicom.dcmread(file, **options)


def open_series(folder: Path, tags: Sequence[str] | None = TAGS) -> Series:
    """Read the headers of the images of a folder, and sort them along the axis of the slices.

    `tags` are the fields that are read; None: all.
    """
    options = {} if tags is None else {"specific_tags": list(tags)}
    found: dict[str, list[tuple[Path, Any]]] = {}
    for file in list_dicom_files(folder):
        with describe_read_errors():
            dataset = read_dataset(file, stop_before_pixels=True, **options)
        if "Rows" in dataset:  # not a report or a presentation state
            found.setdefault(str(dataset.get("SeriesInstanceUID")), []).append((file, dataset))
    if len(found) > 1:
        listed = [
            f"{images[0][1].get('SeriesDescription') or images[0][1].get('Modality')} "
            f"({len(images)} images, {images[0][0].name}, ...)"
            for images in found.values()
        ]
        raise UnreadableFileError(
            f"holds {len(found)} series: {join_first(listed)}; give each a folder of its own"
        )
    if not found:
        raise UnreadableFileError("holds no DICOM images")
    (images,) = found.values()
    with describe_read_errors():
        check_images(images)
        return sort_slices(images)


def check_images(images: Sequence[tuple[Path, Any]]) -> None:
    """Refuse images that do not form one volume."""
    name, first = images[0][0].name, images[0][1]
    for file, dataset in images:
        for tag in ("PixelSpacing", "ImageOrientationPatient", "ImagePositionPatient"):
            if not dataset.get(tag):
                raise UnreadableFileError(f"has {file.name} without {tag}: remove it")
        for tag in (
            *("Rows", "Columns", "PixelSpacing", "ImageOrientationPatient"),
            *("SamplesPerPixel", "BitsAllocated", "PixelRepresentation"),
        ):
            tolerance = 1e-3 if tag == "ImageOrientationPatient" else 0
            values = np.array(dataset.get(tag), float), np.array(first.get(tag), float)
            if not np.allclose(*values, rtol=0, atol=tolerance, equal_nan=True):
                raise UnreadableFileError(
                    f"has {tag} {first.get(tag)} in {name}, {dataset.get(tag)} in {file.name}: "
                    "separate the images"
                )


def sort_slices(images: Sequence[tuple[Path, Any]]) -> Series:
    """Return the series of images that form one volume."""
    first = images[0][1]
    orientation = np.array(first.ImageOrientationPatient, float)
    positions = np.array([d.ImagePositionPatient for _, d in images], float)
    order = np.argsort(positions @ get_normal(orientation), kind="stable")
    files, datasets = [images[n][0] for n in order], [images[n][1] for n in order]
    positions = positions[order]
    check_positions(positions, orientation, files)
    affine = compute_affine(
        *(orientation, np.array(first.PixelSpacing, float)),
        *(positions[0], positions[-1], len(positions), float(first.get("SliceThickness") or 1)),
    )
    return Series(files=files, datasets=datasets, affine=affine)


def get_normal(orientation: np.ndarray) -> np.ndarray:
    """Return the axis of the slices, given those of the rows and columns."""
    return np.cross(orientation[:3], orientation[3:])


def check_positions(positions: np.ndarray, orientation: np.ndarray, files: Sequence[Path]) -> None:
    """Refuse slices that are missing, twice at one position, shifted or at uneven distances."""
    even = np.linspace(positions[0], positions[-1], len(positions))
    gaps = np.diff(positions @ get_normal(orientation))
    if len(gaps) < 2:
        return
    usual = float(np.median(gaps))
    drift = np.linalg.norm(positions - even, axis=1).max()
    if max(drift, np.abs(gaps - usual).max()) > GAP_TOLERANCE * usual:
        n = int(np.abs(gaps - usual).argmax())
        raise UnreadableFileError(
            f"has slices {gaps.min():.4g} to {gaps.max():.4g} mm apart, as between "
            f"{files[n].name} and {files[n + 1].name}: copy those that are missing, separate "
            "phases, or resample it to even distances, into a file of another format"
        )


def compute_affine(
    orientation: np.ndarray,
    pixel_spacing: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    count: int,
    thickness: float,
) -> np.ndarray:
    """Return the affine of (columns, rows, slices), given the positions of two of the slices."""
    affine = np.eye(4)
    affine[:3, 0] = orientation[:3] * pixel_spacing[1]
    affine[:3, 1] = orientation[3:] * pixel_spacing[0]
    affine[:3, 2] = get_normal(orientation) * thickness
    if count > 1:
        affine[:3, 2] = (last - first) / (count - 1)
    affine[:3, 3] = first
    return LPS_TO_RAS @ affine


def _read_head(file: Path) -> bytes | None:
    """Return a DICOM file's first bytes; None if it is another."""
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    return head if head[128:132] == b"DICM" else None
