"""Check a dataset: its headers, fast enough before every run, and its voxels."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import product
from pathlib import Path

import numpy as np

from unet3d.data.annotated import Annotations
from unet3d.data.case import Case, Finding
from unet3d.data.formats.volume_format import (
    UnreadableFileError,
    VolumeHeader,
    find_other_name,
    iter_slabs,
)
from unet3d.data.formats.volumes import (
    FIX_2D,
    MAX_TILT,
    NOT_2D,
    describe_mixed_axes,
    find_format,
    measure_shear,
    read_header,
    read_volume,
)
from unet3d.data.preprocessing.pipeline import check_label_values, count_nonfinite
from unet3d.text import format_bytes, join_first, pluralize

MIN_SIZE = 4  # a volume with fewer voxels along an axis is a slice, or its axes are mixed up

SPACING_RANGE_MM = (1e-8, 1e3)
"""Voxel sizes from a tenth of an angstrom to a meter; others come from wrong units."""

SPACING_TOLERANCE = 1e-3  # tolerated relative difference of spacings, which headers round
OFFSET_TOLERANCE = 0.1
"""Tolerated distance in voxels between the corners of an image and of its label."""

DAMAGES = ("is empty", "is damaged", "cannot be", "lacks", "names")
"""How problems of files begin that another copy of the file may not have."""

FIX_SHAPE = "resample one onto the other's grid, or remove the case"
FIX_GRID = "resample one onto the other's grid, or correct the header that is wrong"

Problems = Iterator[tuple[str, str]]  # (problem, fix) pairs


ODD_RATIO = 10
"""Ratio to the median spacing above which a unit is likely wrong; slices of CT are 0.5 to 5 mm."""


def check_headers(
    cases: Sequence[Case],
    *,
    channels: int,
    ram: int | None = None,
    label_names: Mapping[str, tuple[int, ...]] | None = None,
) -> list[Finding]:
    """Return the problems that can be found without decoding a voxel."""
    names = dict(label_names or {})
    findings = list(find_duplicates(cases))
    for case in cases:
        if mixed := describe_mixed_axes(case.images[0], case.label):
            advice = "save the arrays transposed (array.T), unless they are (x, y, z) already"
            findings.append(Finding(None, None, mixed, advice, is_hint=True))
            break
    for case in cases:
        findings += check_scan_headers(
            case.name, case.images, case.label, names, channels=channels, ram=ram
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
            if user != case.name:
                advice = "list the correct file, or remove the case"
                yield Finding(case.name, file, f"is listed twice, first for {user}", advice)


def check_scan_headers(
    name: str,
    images: Sequence[Path],
    label: Path | None = None,
    label_names: dict[str, tuple[int, ...]] | None = None,
    *,
    channels: int | None = None,
    ram: int | None = None,
) -> Iterator[Finding]:
    """Check each header of a case alone and against the first image's.

    Names of labels are compared with those known, and added to them. None: a scan without a label,
    any number of channels, any number of bytes to read.
    """
    headers: dict[Path, VolumeHeader] = {}
    for file in (*images, *([] if label is None else [label])):
        try:
            is_label = file == label
            header = read_header(file, next(iter(headers.values()), None) if is_label else None)
        except UnreadableFileError as error:
            yield make_unreadable_finding(name, file, error)
            continue
        for problem in check_single_header(header, is_label=is_label, ram=ram):
            yield Finding(name, file, *problem)
        headers[file] = header
        names = {} if label_names is None or not is_label else label_names
        if problem := find_other_name(header, names, "the classes or another case"):
            advice = "number the structures alike in all files, in the order of the classes"
            yield Finding(name, file, problem, advice)
    readable = [file for file in images if file in headers]
    total = sum(headers[file].num_channels for file in readable)
    if channels is not None and len(readable) == len(images) and total != channels:
        shape = format_range(headers[images[0]].shape)
        message = f"has shape {shape}: {total} channels in total, but the dataset names {channels}"
        advice = "keep only the channels that the dataset names, or correct its description"
        yield Finding(name, images[0], message, advice)
    for file, header in headers.items():
        if readable and file != readable[0]:
            other = "its image" if file == label else readable[0].name
            for problem in check_alignment(header, headers[readable[0]], other):
                yield Finding(name, file, *problem)


def make_unreadable_finding(case: str, file: Path, error: UnreadableFileError) -> Finding:
    """Build the finding for a file that is missing or corrupted, or no volume."""
    advice = "add it" if error.problem == "is missing" else "correct it"
    if error.problem.startswith(DAMAGES):
        advice = "copy or download it again"
    return Finding(case, file, error.problem, f"{advice}, or remove the case")


def check_single_header(header: VolumeHeader, *, is_label: bool, ram: int | None) -> Problems:
    """Check one header."""
    size = format_range(header.shape)
    if ram is not None and header.reading_bytes > ram:
        yield (
            f"declares {size} voxels: reading it takes {format_bytes(header.reading_bytes)} of "
            f"RAM, {format_bytes(ram)} are available",
            "correct its header, crop or downsample it, or remove the case",
        )
    if header.dtype.kind not in "iuf":
        yield f"has voxels of {header.dtype}, not one real number each", "save it as real numbers"
    if is_label and header.num_channels != 1:
        yield f"has shape {size}: it must be one 3D volume", "save only the volume that is meant"
    elif min(header.shape[:3]) == 1:
        yield f"has only {size} voxels; {NOT_2D}", FIX_2D
    elif min(header.shape[:3]) < MIN_SIZE:
        yield f"has only {size} voxels", "check whether its axes are mixed up, or remove the case"
    if not is_valid_affine(header.affine):
        yield (
            f"has the invalid affine {format_affine(header.affine)}",
            "write an affine whose first three columns are the axes in mm",
        )


def is_valid_affine(affine: np.ndarray) -> bool:
    """Return whether (4, 4) is finite, affine, invertible and of plausible spacing."""
    is_complete = affine.shape == (4, 4) and np.isfinite(affine).all()
    if not is_complete or not np.allclose(affine[3], [0, 0, 0, 1]):  # as of a transposed one
        return False
    spacing, (low, high) = np.linalg.norm(affine[:3, :3], axis=0), SPACING_RANGE_MM
    # If the determinant of the unit axes is near 0, two axes are parallel.
    return bool(
        ((spacing >= low) & (spacing <= high)).all()
        and abs(np.linalg.det(affine[:3, :3] / spacing)) > 1e-3
    )


def check_alignment(header: VolumeHeader, other: VolumeHeader, name: str) -> Problems:
    """Compare a file's grid with that of another file, called `name`."""
    if header.shape[:3] == other.shape[:3] and np.array_equal(header.affine, other.affine):
        return  # most files: what follows takes longer than reading a header
    if header.shape[:3] != other.shape[:3]:
        shapes = format_range(header.shape), format_range(other.shape)
        yield f"has shape {shapes[0]}, but {name} {shapes[1]}", FIX_SHAPE
    if not (is_valid_affine(header.affine) and is_valid_affine(other.affine)):
        return
    if header.orientation != other.orientation:
        yield f"has orientation {header.orientation}, but {name} {other.orientation}", FIX_GRID
        return
    if not np.allclose(header.spacing_mm, other.spacing_mm, rtol=SPACING_TOLERANCE, atol=0):
        spacings = format_range(header.spacing_mm), format_range(other.spacing_mm)
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


def read_image_headers(cases: Sequence[Case]) -> dict[Path, VolumeHeader]:
    """Return the headers of the first image of each case, without those that cannot be read."""
    headers = {}
    for case in cases:
        with suppress(UnreadableFileError):
            headers[case.images[0]] = read_header(case.images[0])
    return headers


def describe_images(headers: Mapping[Path, VolumeHeader]) -> str:
    """Describe the formats of images, and the ranges of their sizes and spacings."""
    counts = Counter(find_format(file).name for file in headers)
    formats = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    if len(counts) < 2:
        formats = "".join(counts) or "unknown format"
    valid = [header for header in headers.values() if is_valid_affine(header.affine)]
    if not valid:
        return f"{formats}, no readable image"
    shapes, spacings = [h.shape[:3] for h in valid], [h.spacing_mm for h in valid]
    codes = sorted({header.orientation for header in valid})
    along = f" along the axes of each file ({join_first(codes)})" if len(codes) > 1 else ""
    return f"{formats}, {format_range(*shapes)} voxels of {format_range(*spacings)} mm{along}"


def find_assumptions(headers: Collection[VolumeHeader], cases: int) -> list[Finding]:
    """Return hints on spacings, orientations and right angles that the images do not have."""
    fix = "write the {} into the files, unless it is the same in all of them"
    counts = Counter((h.assumption, fix.format("voxel size")) for h in headers if h.assumption)
    counts += Counter(
        (f"no orientation: {h.orientation} is assumed", fix.format("orientation"))
        for h in headers
        if not h.has_orientation
    )
    counts += Counter(
        (
            f"axes over {MAX_TILT} degrees off orthogonal",
            "distances and volumes are as if they were",
        )
        for h in headers
        if measure_shear(h) > MAX_TILT
    )
    return [
        Finding(None, None, f"{count} of {cases} cases have {assumption}", advice, is_hint=True)
        for (assumption, advice), count in counts.items()
    ]


def find_odd_spacings(headers: Mapping[Path, VolumeHeader]) -> list[Finding]:
    """Return a hint on images whose voxels are of another order of magnitude than the others'."""
    if not headers:
        return []
    sizes = np.array([header.spacing_mm for header in headers.values()])
    ratios = sizes / np.median(sizes, axis=0)
    odd = (np.maximum(ratios, 1 / ratios) > ODD_RATIO).any(axis=1)
    names = [file.name for file, is_odd in zip(headers, odd, strict=True) if is_odd]
    if not names:
        return []
    message = f"{pluralize(len(names), 'image')} with voxels {ODD_RATIO:g} times as large or small "
    message += f"as those of most others: {join_first(names)}"
    return [Finding(None, None, message, "check the unit of the spacing", is_hint=True)]


def format_range(*rows: Sequence[float]) -> str:
    """Format sizes or spacings: of several, the minimum and maximum along each axis.

    >>> format_range((31, 40, 1.0), (43, 40, 1.0))
    '31..43 x 40 x 1'
    """
    ends = ([f"{end(axis):.5g}" for end in (min, max)] for axis in zip(*rows, strict=True))
    return " x ".join(low if low == high else f"{low}..{high}" for low, high in ends)


def format_affine(affine: np.ndarray) -> str:
    """Format the first three rows of an affine."""
    return "[" + ", ".join(" ".join(f"{n:.4g}" for n in row) for row in affine[:3]) + "]"


def check_voxels(
    cases: Sequence[Case],
    *,
    classes: Sequence[str],
    label_values: Sequence[int] | None = None,
    ignore_labels: Sequence[int],
    annotations: Annotations | None = None,
    ram: int | None = None,
    workers: int,
    progress: Callable[[int, int], None],  # called with (cases done, cases in total)
) -> list[Finding]:
    """Return the problems of the voxels, and of unreadable files as `check_headers` does."""
    findings: list[Finding] = []
    present, values = set[int](), set[int]()
    first_users: dict[bytes, tuple[str, Path]] = {}

    known = label_values or range(len(classes))
    check = partial(check_case_voxels, known=known, ignore_labels=ignore_labels, ram=ram)
    with ThreadPoolExecutor(workers) as pool:
        results = zip(cases, pool.map(check, cases), strict=True)
        for done, (case, (problems, labels, digests)) in enumerate(results, 1):
            findings += problems
            values |= labels
            labels = {known.index(value) for value in labels if value in known}
            present |= labels
            if annotations is not None:
                for problem in annotations.find_contradictions(case.name, labels):
                    advice = "list the class in data.annotated, or remove the label"
                    findings.append(Finding(case.name, case.label, problem, advice))
            for file, digest in digests.items():
                name, twin = first_users.setdefault(digest, (case.name, file))
                if os.path.realpath(twin) != os.path.realpath(file):
                    message = f"holds the same voxels as {twin.name} of {name}"
                    advice = "replace it with the correct file, or remove one of the cases"
                    findings.append(Finding(case.name, file, message, advice))
            progress(done, len(cases))
    if unknown := values.difference(known, ignore_labels):
        found = join_first([*map(str, sorted(values))], 10)
        message = f"labels hold the values {found}, of which {len(unknown)} are no classes"
        negative = sorted(value for value in unknown if value < 0)  # these cannot be classes
        used = sorted({0, *values}.difference(ignore_labels, negative))
        setting = f"[{', '.join(map(str, used))}]" if len(used) == len(classes) <= 20 else "auto"
        advice = f"set data.label_values={setting} to make each of them a class, in this order"
        if setting == "auto":
            advice += ", and leave out data.num_classes and data.classes; if each value is an "
            advice += "object, write 1 for all of them: classes are learned, not instances"
        if negative or len(unknown) == 1:
            ignored = f"[{','.join(map(str, negative or unknown))}]"
            other = "" if len(negative) == len(unknown) else f"{advice}; "
            advice = f"{other}set data.ignore_label={ignored} if nobody labeled these voxels"
        findings.append(Finding(None, None, message, advice, is_hint=True))
    for label, name in zip(known, classes, strict=True):
        if present and known.index(label) not in present:
            message = f"class {label} ({name}) occurs in no label"
            advice = "remove it from the classes, or check the numbering of the labels"
            findings.append(Finding(None, None, message, advice))
    return findings


def check_case_voxels(
    case: Case, known: Sequence[int], ignore_labels: Sequence[int], ram: int | None
) -> tuple[list[Finding], set[int], dict[Path, bytes]]:
    """Return problems of a case, its labels, and digests of its files that are not constant."""
    findings: list[Finding] = []
    labels: set[int] = set()
    digests: dict[Path, bytes] = {}
    for file in (*case.images, case.label):
        try:
            header = read_header(file)
            if header.dtype.kind not in "iuf" or (ram is not None and header.reading_bytes > ram):
                continue  # check_headers reports it
            volume, _ = read_volume(file)
        except UnreadableFileError as error:
            findings.append(make_unreadable_finding(case.name, file, error))
            continue
        if file == case.label:
            present = collect_values(volume)
            labels.update(int(value) for value in present.tolist() if value % 1 == 0)
            problems = check_label_values(present, known, ignore_labels)
        else:
            problems = check_image_voxels(volume)
        findings.extend(Finding(case.name, file, *problem) for problem in problems)
        if any(channel.min() < channel.max() for channel in volume):
            digests[file] = digest_voxels(volume)
    return findings, labels, digests


def digest_voxels(channels: np.ndarray) -> bytes:
    """Return a digest of the values of (C, D, H, W), whatever their type and order in memory."""
    digest = blake2b(repr(channels.shape).encode(), digest_size=16)
    for values in iter_slabs(channels):
        digest.update(values.data)
    return digest.digest()


def check_image_voxels(channels: np.ndarray) -> Problems:
    """Check the voxels of (C, D, H, W)."""
    if not_finite := count_nonfinite(channels):
        message = f"holds NaN or infinity in {not_finite:,} of {channels.size:,} voxels"
        yield message, "replace them with finite values, or remove the case"
    for index, channel in enumerate(channels):
        low, high = channel.min(), channel.max()  # NaN if any voxel is
        if low == high:
            prefix = f"channel {index} " if len(channels) > 1 else ""
            message = f"{prefix}is {low:g} everywhere"
            yield message, "replace it with the correct file, or remove the case"


def collect_values(channels: np.ndarray) -> np.ndarray:
    """Return the different values of a label file."""
    ends = [  # labels come in runs: the last voxel of each is enough, and faster to sort
        values[np.append(values[1:] != values[:-1], True)] for values in iter_slabs(channels)
    ]
    return np.unique(np.concatenate(ends))
