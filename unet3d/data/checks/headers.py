"""Check the headers of a dataset; fast enough to run before every run."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np

from unet3d.data.case import Case
from unet3d.data.findings import Finding
from unet3d.data.formats.volume_format import FIX_2D, NOT_2D, UnreadableFileError, VolumeHeader
from unet3d.data.formats.volumes import find_format, read_header
from unet3d.text import format_bytes

MIN_SIZE = 4
"""A volume with fewer voxels along an axis is a slice, or its axes are mixed up."""

SPACING_RANGE_MM = (1e-6, 1e3)
"""Voxel sizes from a nanometer to a meter; others come from wrong units."""

SPACING_TOLERANCE = 1e-3
"""Tolerated relative difference of spacings, which headers round."""

OFFSET_TOLERANCE = 0.1
"""Tolerated distance in voxels between the corners of an image and of its label."""

FIX_SHAPE = "resample one onto the other's grid, or remove the case"
FIX_GRID = (
    "if the voxel grids already match, copy the correct header; else resample one onto the other"
)


def check_headers(cases: Sequence[Case], *, channels: int, ram: int | None = None) -> list[Finding]:
    """Return the problems that can be found without decoding a voxel.

    A case whose voxels take more than the available `ram` is one; None: that is unknown.
    """
    findings = list(find_duplicates(cases))
    for case in cases:
        findings += check_scan_headers(
            case.name, case.images, case.label, channels=channels, ram=ram
        )
    return findings


def find_duplicates(cases: Iterable[Case]) -> Iterator[Finding]:
    """Find names and files that are used more than once."""
    names: set[str] = set()
    users: dict[str, str] = {}
    for case in cases:
        if case.name in names:
            advice = "give the cases unique names: folds and predictions refer to names"
            yield Finding(case.name, None, "two cases have this name", advice)
        names.add(case.name)
        for file in (*case.images, case.label):
            user = users.setdefault(os.path.realpath(file), case.name)
            if user != case.name or [*case.images, case.label].count(file) > 1:
                advice = "list the correct file, or remove the case"
                yield Finding(case.name, file, f"is listed twice, first for {user}", advice)


def check_scan_headers(
    name: str,
    images: Sequence[Path],
    label: Path | None = None,
    *,
    channels: int | None = None,
    ram: int | None = None,
) -> Iterator[Finding]:
    """Check each header of a case alone and against the first image's.

    None: a scan without a label, any number of channels, any size.
    """
    headers: dict[Path, VolumeHeader] = {}
    for file in (*images, *([] if label is None else [label])):
        try:
            header = read_header(file, next(iter(headers.values()), None))
        except UnreadableFileError as error:
            yield make_unreadable_finding(name, file, error)
            continue
        if ram is not None and header.reading_bytes > ram:
            message = (
                f"declares {format_sizes(header.shape)} voxels: reading it takes "
                f"{format_bytes(header.reading_bytes)} of RAM, {format_bytes(ram)} are available"
            )
            advice = "correct its header, crop or downsample it, or remove the case"
            yield Finding(name, file, message, advice, is_too_large=True)
        for message, advice in check_single_header(header, is_label=file == label):
            yield Finding(name, file, message, advice)
        if is_3d(header):
            headers[file] = header
    readable = [file for file in images if file in headers]
    total = sum(headers[file].num_channels for file in readable)
    if channels is not None and len(readable) == len(images) and total != channels:
        shape = format_sizes(headers[images[0]].shape)
        message = f"has shape {shape}: {total} channels in total, but the dataset names {channels}"
        advice = "keep only the channels that the dataset names, or correct its description"
        yield Finding(name, images[0], message, advice)
    if not readable:
        return
    first = readable[0]
    for file, header in headers.items():
        if file != first:
            other = "its image" if file == label else first.name
            for message, advice in check_alignment(header, headers[first], other):
                yield Finding(name, file, message, advice)


def make_unreadable_finding(case: str, file: Path, error: UnreadableFileError) -> Finding:
    """Build the finding for a file that is missing or corrupted."""
    advice = "add it" if str(error) == "is missing" else "copy or download it again"
    return Finding(case, file, str(error), f"{advice}, or remove the case")


def check_single_header(header: VolumeHeader, *, is_label: bool) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) of one header."""
    shape = header.shape
    if header.dtype.kind not in "iuf":
        yield f"has voxels of {header.dtype}, not one real number each", "save it as real numbers"
    is_2d = sum(size > 1 for size in shape[:3]) == 2
    reason = f"; {NOT_2D}" if is_2d else ""
    if not is_3d(header) or (is_label and header.num_channels != 1):
        expected = "one 3D volume" if is_label else "3D, or 4D with the channels last"
        yield (
            f"has shape {format_sizes(shape)}: it must be {expected}{reason}",
            FIX_2D if is_2d else "save only the volume that is meant",
        )
    elif min(shape[:3]) < MIN_SIZE:
        advice = FIX_2D if is_2d else "check whether its axes are mixed up, or remove the case"
        yield f"has only {format_sizes(shape)} voxels{reason}", advice
    if not has_valid_affine(header):
        yield (
            f"has the invalid affine {format_affine(header.affine)}",
            "write an affine whose first three columns are the axes in mm",
        )


def is_3d(header: VolumeHeader) -> bool:
    """Return whether the file holds a 3D volume, or several as channels."""
    return len(header.shape) in (3, 4)


def has_valid_affine(header: VolumeHeader) -> bool:
    """Return whether the affine is finite, invertible and of plausible spacing."""
    if not np.isfinite(header.affine).all():
        return False
    spacing = np.array(header.spacing_mm)
    low, high = SPACING_RANGE_MM
    # If the determinant of the unit axes is near 0, two axes are parallel.
    return bool(
        ((spacing >= low) & (spacing <= high)).all()
        and abs(np.linalg.det(header.affine[:3, :3] / spacing)) > 1e-3
    )


def check_alignment(
    header: VolumeHeader, other: VolumeHeader, name: str
) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) if a file's grid is not that of another file, called `name`."""
    if header.shape[:3] == other.shape[:3] and np.array_equal(header.affine, other.affine):
        return  # most files: what follows takes longer than reading a header
    from nibabel.orientations import aff2axcodes

    if header.shape[:3] != other.shape[:3]:
        shapes = format_sizes(header.shape), format_sizes(other.shape)
        yield f"has shape {shapes[0]}, but {name} {shapes[1]}", FIX_SHAPE
    if not (has_valid_affine(header) and has_valid_affine(other)):
        return
    codes = ["".join(aff2axcodes(h.affine)) for h in (header, other)]
    if codes[0] != codes[1]:
        yield f"has orientation {codes[0]}, but {name} {codes[1]}", FIX_GRID
        return
    if not np.allclose(header.spacing_mm, other.spacing_mm, rtol=SPACING_TOLERANCE, atol=0):
        spacings = format_sizes(header.spacing_mm), format_sizes(other.spacing_mm)
        yield f"has spacing {spacings[0]} mm, but {name} {spacings[1]} mm", FIX_GRID
        return
    corners = np.array([(*c, 1) for c in product(*((0, n - 1) for n in header.shape[:3]))])
    offset = np.linalg.norm(corners @ (header.affine - other.affine).T, axis=1).max()
    if offset > OFFSET_TOLERANCE * min(header.spacing_mm):
        yield (
            f"is offset by up to {offset:.3g} mm from {name}: "
            f"affine {format_affine(header.affine)} and {format_affine(other.affine)}",
            FIX_GRID,
        )


def describe_formats(cases: Sequence[Case]) -> str:
    """Name the formats of the images: one, or each with the number of its cases."""
    counts: Counter[str] = Counter()
    for case in cases:
        with suppress(UnreadableFileError):
            counts[find_format(case.images[0]).name] += 1
    if len(counts) < 2:
        return "".join(counts) or "unknown format"
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def read_image_headers(cases: Sequence[Case]) -> list[VolumeHeader]:
    """Return the header of the first image of each case, without those that cannot be read."""
    headers = []
    for case in cases:
        with suppress(UnreadableFileError):
            headers.append(read_header(case.images[0]))
    return headers


def find_assumptions(headers: Sequence[VolumeHeader], cases: int) -> list[Finding]:
    """Return hints on what the images of `cases` cases do not say of their spacing."""
    counts = Counter(header.assumption or "" for header in headers)
    advice = "write the voxel size into the files, unless it is the same in all of them"
    return [
        Finding(None, None, f"{count} of {cases} cases have {assumption}", advice, is_hint=True)
        for assumption, count in counts.items()
        if assumption
    ]


def describe_extent(headers: Sequence[VolumeHeader]) -> str:
    """Describe the ranges of sizes and spacings of images."""
    valid = [header for header in headers if is_3d(header) and has_valid_affine(header)]
    if not valid:
        return "no readable image"
    shapes, spacings = ([h.shape[:3] for h in valid], [h.spacing_mm for h in valid])
    return f"{format_range(shapes)} voxels of {format_range(spacings)} mm"


def format_range(rows: Iterable[Sequence[float]]) -> str:
    """Format the minimum and maximum along each axis.

    >>> format_range([(31, 40, 1.0), (43, 40, 1.0)])
    '31..43 x 40 x 1'
    """
    ends = ([f"{end(axis):.5g}" for end in (min, max)] for axis in zip(*rows, strict=True))
    return " x ".join(low if low == high else f"{low}..{high}" for low, high in ends)


def format_sizes(numbers: Sequence[float]) -> str:
    """Format sizes or spacings.

    >>> format_sizes([0.5, 1.0, 2])
    '0.5 x 1 x 2'
    """
    return " x ".join(f"{n:.5g}" for n in numbers)


def format_affine(affine: np.ndarray) -> str:
    """Format the first three rows of an affine."""
    return "[" + ", ".join(" ".join(f"{n:.4g}" for n in row) for row in affine[:3]) + "]"
