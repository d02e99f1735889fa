"""The faults of a data set that only its voxels show: every file is read to its end, in pieces."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from unet3d.data.case import Case
from unet3d.data.checks.headers import unreadable_finding
from unet3d.data.findings import Finding
from unet3d.data.nifti.stream import Header, UnreadableFileError, iter_voxels, read_header
from unet3d.data.preprocessing.background import AUTO, Background, StreamedBorder

MANY = 1000
"""More values than a label has classes; further ones are not collected."""

Faults = list[tuple[str, str]]
"""What is wrong, what to do."""


@dataclass(frozen=True)
class CaseVoxels:
    """What the voxels of one case show."""

    findings: list[Finding]
    digests: dict[Path, bytes]  # of files that hold more than one value
    labels: set[int]
    borders: list[float | None]  # of each channel


def check_voxels(
    cases: Sequence[Case],
    *,
    classes: Sequence[str],
    ignore_label: int | None,
    channels: Sequence[str] = (),
    background: Background = (0,),
    workers: int,
    progress: Callable[[int, int], None],
) -> list[Finding]:
    """What is wrong with the voxels, and what could not be read, in the words of `headers`.

    `progress` is told how many cases are done, and of how many.
    """
    found: list[Finding] = []
    present: set[int] = set()
    first: dict[bytes, tuple[str, Path]] = {}
    borders: dict[str, list[float]] = {}  # values that data.background leaves in, by case
    look = partial(check_case_voxels, classes=len(classes), ignore_label=ignore_label)
    with ThreadPoolExecutor(workers) as pool:
        for done, (case, here) in enumerate(zip(cases, pool.map(look, cases), strict=True), 1):
            found += here.findings
            present |= here.labels
            if unlike := left_in(here.borders, channels, background):
                borders[case.name] = unlike
            for file, digest in here.digests.items():
                name, twin = first.setdefault(digest, (case.name, file))
                if os.path.realpath(twin) != os.path.realpath(file):
                    what = f"holds the same voxels as {twin.name} of {name}"
                    do = "put the right file here, or take one of the cases out"
                    found.append(Finding(case=case.name, file=file, what=what, do=do))
            progress(done, len(cases))
    for number, name in enumerate(classes):
        if present and number not in present:
            what = f"class {number} ({name}) occurs in no label"
            do = "take it out of the classes, or look whether the labels count otherwise"
            found.append(Finding(case=None, file=None, what=what, do=do))
    if borders:
        found.append(border_hint(borders, len(cases)))
    return found


def left_in(
    borders: Sequence[float | None], channels: Sequence[str], background: Background
) -> list[float]:
    """The values of constant borders that are not background; air in CT is a value like others."""
    asked = background if len(background) > 1 else background * len(borders)
    return [
        border
        for border, value, name in zip(borders, asked, channels, strict=False)
        if border is not None and name.upper() != "CT" and value not in (AUTO, border)
    ]


def border_hint(borders: Mapping[str, Sequence[float]], cases: int) -> Finding:
    """What to set where nothing was scanned but the files hold a number."""
    values = [value for case in borders.values() for value in case]
    span = " to ".join(dict.fromkeys(f"{end(values):.4g}" for end in (min, max)))
    what = f"{len(borders)} of {cases} cases have a constant border that is not data.background"
    do = "set data.background=auto, so that crop and normalization leave it out"
    return Finding(case=None, file=None, what=f"{what}: {span}", do=do, hint=True)


def check_case_voxels(case: Case, *, classes: int, ignore_label: int | None) -> CaseVoxels:
    """Read the files of one case."""
    found = CaseVoxels([], {}, set(), [])
    for file in (*case.images, case.label):
        try:
            header = read_header(file)
            if header.dtype.kind not in "iuf":
                continue  # the header shows it
            if file == case.label:
                faults, digest, labels = check_label_voxels(file, header, classes, ignore_label)
                found.labels.update(labels)
            else:
                faults, digest, borders = check_image_voxels(file, header)
                found.borders.extend(borders)
        except UnreadableFileError as reason:
            found.findings.append(unreadable_finding(case, file, reason))
            continue
        found.findings.extend(
            Finding(case=case.name, file=file, what=what, do=do) for what, do in faults
        )
        if digest is not None:
            found.digests[file] = digest
    return found


def check_image_voxels(
    file: Path, header: Header
) -> tuple[Faults, bytes | None, list[float | None]]:
    """Of an image, the digest of its voxels unless it is constant, and its channels' borders."""
    low = np.full(header.num_channels, np.inf)
    high, broken, total = -low, 0, 0
    digest = blake2b(repr(header.shape).encode(), digest_size=16)
    solid = len(header.shape) >= 3 and min(header.shape) > 0
    borders = [StreamedBorder(header.shape[:3]) for _ in range(header.num_channels if solid else 0)]
    for channel, values in iter_voxels(file, header):
        digest.update(values.data)
        total += len(values)
        if solid:
            borders[channel].add(values)
        finite = np.isfinite(values)
        if not finite.all():
            values = values[finite]
            broken += len(finite) - len(values)
        if len(values):
            low[channel] = min(low[channel], values.min())
            high[channel] = max(high[channel], values.max())
    faults = []
    if broken:
        do = "replace them by numbers, or take the case out"
        faults.append((f"holds NaN or infinity in {broken:,} of {total:,} voxels", do))
    for channel in np.flatnonzero(low == high):
        which = f"channel {channel} " if header.num_channels > 1 else ""
        what = f"{which}is {low[channel]:g} everywhere"
        faults.append((what, "put the right file here, or take the case out"))
    constant = bool((low >= high).all())
    found = [border.value for border in borders]
    return faults, None if constant else digest.digest(), found


def check_label_voxels(
    file: Path, header: Header, classes: int, ignore_label: int | None
) -> tuple[Faults, bytes | None, set[int]]:
    """Of a label, the digest of its voxels unless it is constant, and the classes in it."""
    present = np.empty(0, np.float32)
    digest = blake2b(repr(header.shape).encode(), digest_size=16)
    for _, values in iter_voxels(file, header):
        digest.update(values.data)
        if len(present) < MANY:
            # Labels come in runs: one voxel of each is enough, and quick to sort.
            ends = np.append(np.flatnonzero(values[1:] != values[:-1]), len(values) - 1)
            present = np.union1d(present, values[ends])
    finite = present[np.isfinite(present)]
    whole = finite == np.round(finite)
    labels = {int(v) for v in finite[whole]}
    outside = sorted(labels - set(range(classes)) - {ignore_label})
    faults = []
    if len(finite) < len(present):
        faults.append(("holds NaN or infinity", "replace them by labels"))
    if not whole.all():
        what = f"holds {join_first(finite[~whole])}: labels must be whole numbers"
        faults.append((what, "label again, or resample without interpolating between labels"))
    if outside:
        ignored = "" if ignore_label is None else f" or {ignore_label} (ignored)"
        what = f"holds {join_first(outside)}: labels must be 0..{classes - 1}{ignored}"
        faults.append((what, "correct the label, the classes, or data.ignore_label"))
    return faults, digest.digest() if len(present) > 1 else None, labels & set(range(classes))


def join_first(values: Sequence[float] | np.ndarray) -> str:
    """The first five.

    >>> join_first([0.5, 7])
    '0.5, 7'
    """
    more = "" if len(values) <= 5 else f" and {len(values) - 5} more"
    return ", ".join(f"{v:g}" for v in values[:5]) + more
