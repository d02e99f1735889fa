"""The faults of a data set that its headers show: quick, and so done before every training."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np

from unet3d.data.case import Case
from unet3d.data.findings import Finding
from unet3d.data.nifti.reader import volume_shape
from unet3d.data.nifti.stream import Header, UnreadableFileError, read_header

LEAST_SIDE = 4
"""A volume with fewer voxels along an axis is a slice, or its axes are mixed up."""

SPACINGS_MM = (1e-6, 1e3)
"""From a nanometre to a metre: other sizes of a voxel are a slip of units."""

SPACING_TOLERANCE = 1e-3
"""Of a spacing; headers round it."""

PLACE_TOLERANCE = 0.1
"""Of a voxel, between the corners of an image and of its label."""

RESAMPLE = "resample one onto the other's grid, or take the case out"
GRID = "if the voxels lie on each other, copy the right header; else resample one onto the other"


def check_headers(cases: Sequence[Case], *, channels: int) -> list[Finding]:
    """What is wrong with the files, as far as that can be told without decoding a voxel."""
    return [
        *find_duplicates(cases),
        *(f for case in cases for f in check_case_headers(case, channels)),
    ]


def find_duplicates(cases: Iterable[Case]) -> Iterator[Finding]:
    """Names and files that two cases share, or that stand twice in one."""
    names: set[str] = set()
    users: dict[str, str] = {}
    for case in cases:
        if case.name in names:
            do = "give them names of their own: folds and predictions go by name"
            yield Finding(case=case.name, file=None, what="two cases have this name", do=do)
        names.add(case.name)
        for file in (*case.images, case.label):
            user = users.setdefault(os.path.realpath(file), case.name)
            if user != case.name or [*case.images, case.label].count(file) > 1:
                yield Finding(
                    case=case.name,
                    file=file,
                    what=f"is listed twice, first for {user}",
                    do="name the right file here, or take the case out",
                )


def check_case_headers(case: Case, channels: int) -> Iterator[Finding]:
    """The headers of one case, each by itself and against the first image's."""
    found: dict[Path, Header] = {}
    for file in (*case.images, case.label):
        try:
            header = read_header(file)
        except UnreadableFileError as reason:
            yield unreadable_finding(case, file, reason)
            continue
        for what, do in check_single_header(header, is_label=file == case.label):
            yield Finding(case=case.name, file=file, what=what, do=do)
        if is_3d(header):
            found[file] = header
    images = [found[file] for file in case.images if file in found]
    total = sum(header.num_channels for header in images)
    if len(images) == len(case.images) and total != channels:
        shape = format_sizes(images[0].shape)
        yield Finding(
            case=case.name,
            file=case.images[0],
            what=f"has shape {shape}: {total} channels in all, the data set names {channels}",
            do="keep the channels that the data set names, or correct its description",
        )
    if not images:
        return
    first = next(file for file in case.images if file in found)
    for file, header in found.items():
        if file != first:
            name = "its image" if file == case.label else first.name
            for what, do in check_alignment(header, found[first], name):
                yield Finding(case=case.name, file=file, what=what, do=do)


def unreadable_finding(case: Case, file: Path, reason: UnreadableFileError) -> Finding:
    """A file that is not there, or not whole."""
    do = "add it" if str(reason) == "is missing" else "copy or fetch it again"
    return Finding(case=case.name, file=file, what=str(reason), do=f"{do}, or take the case out")


def check_single_header(header: Header, *, is_label: bool) -> Iterator[tuple[str, str]]:
    """(what is wrong, what to do) with one header."""
    shape = header.shape
    if header.dtype.kind not in "iuf":
        yield f"has voxels of {header.dtype}, not one number each", "save it as plain numbers"
    if not is_3d(header) or (is_label and header.num_channels != 1):
        wanted = "one 3D volume" if is_label else "3D, or 4D with the channels last"
        yield (
            f"has shape {format_sizes(shape)}: it must be {wanted}",
            "save the one volume that is meant",
        )
    elif min(shape[:3]) < LEAST_SIDE:
        do = "look whether its axes are mixed up, or take the case out"
        yield f"has only {format_sizes(shape)} voxels", do
    low, high = SPACINGS_MM
    if not all(low <= size <= high for size in header.pixdim):
        do = "write the true size of a voxel into pixdim"
        yield f"has the spacing {format_sizes(header.pixdim)} mm in its header", do
    if not has_valid_affine(header):
        yield (
            f"has the affine {format_affine(header.affine)}, which is no grid in space",
            "write an affine whose first three columns are the axes in mm",
        )


def is_3d(header: Header) -> bool:
    """Whether it is a volume, or several as channels."""
    return len(volume_shape(header)) in (3, 4)


def has_valid_affine(header: Header) -> bool:
    """Whether the affine gives every voxel a place of its own."""
    if not np.isfinite(header.affine).all():
        return False
    spacing = np.array(header.spacing_mm)
    low, high = SPACINGS_MM
    # A determinant of unit axes near 0: two axes point the same way.
    return bool(
        ((spacing >= low) & (spacing <= high)).all()
        and abs(np.linalg.det(header.affine[:3, :3] / spacing)) > 1e-3
    )


def check_alignment(header: Header, other: Header, name: str) -> Iterator[tuple[str, str]]:
    """(what is wrong, what to do) where two files of a case do not lie on each other."""
    from nibabel.orientations import aff2axcodes

    if header.shape[:3] != other.shape[:3]:
        yield (
            f"has shape {format_sizes(header.shape)}, {name} {format_sizes(other.shape)}",
            RESAMPLE,
        )
    if not (has_valid_affine(header) and has_valid_affine(other)):
        return
    codes = ["".join(aff2axcodes(h.affine)) for h in (header, other)]
    if codes[0] != codes[1]:
        yield f"has orientation {codes[0]}, {name} {codes[1]}", GRID
        return
    if not np.allclose(header.spacing_mm, other.spacing_mm, rtol=SPACING_TOLERANCE, atol=0):
        yield (
            f"has spacing {format_sizes(header.spacing_mm)} mm, {name} {format_sizes(other.spacing_mm)} mm",
            GRID,
        )
        return
    corners = np.array([(*c, 1) for c in product(*((0, n - 1) for n in header.shape[:3]))])
    off = np.linalg.norm(corners @ (header.affine - other.affine).T, axis=1).max()
    if off > PLACE_TOLERANCE * min(header.spacing_mm):
        yield (
            f"lies up to {off:.3g} mm beside {name}: "
            f"affine {format_affine(header.affine)} and {format_affine(other.affine)}",
            GRID,
        )


def describe_extent(cases: Sequence[Case]) -> str:
    """The sizes and spacings of the cases' images, of those that can be read."""
    found = []
    for case in cases:
        with suppress(UnreadableFileError):
            header = read_header(case.images[0])
            found += [header] if is_3d(header) and has_valid_affine(header) else []
    if not found:
        return "no image can be read"
    shapes, spacings = zip(*((h.shape[:3], h.spacing_mm) for h in found), strict=True)
    return f"{format_range(shapes)} voxels of {format_range(spacings)} mm"


def format_range(rows: Iterable[Sequence[float]]) -> str:
    """The least and the most along each axis.

    >>> format_range([(31, 40, 1.0), (43, 40, 1.0)])
    '31..43 x 40 x 1'
    """
    ends = ([f"{end(axis):.5g}" for end in (min, max)] for axis in zip(*rows, strict=True))
    return " x ".join(low if low == high else f"{low}..{high}" for low, high in ends)


def format_sizes(numbers: Sequence[float]) -> str:
    """Sizes as people write them.

    >>> format_sizes([0.5, 1.0, 2])
    '0.5 x 1 x 2'
    """
    return " x ".join(f"{n:.5g}" for n in numbers)


def format_affine(affine: np.ndarray) -> str:
    """The three rows of an affine that say something."""
    return "[" + ", ".join(" ".join(f"{n:.4g}" for n in row) for row in affine[:3]) + "]"
