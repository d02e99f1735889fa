"""The faults of a data set that only its voxels show: every file is read to its end, in pieces."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from unet3d.data.case import Case
from unet3d.data.check import unreadable
from unet3d.data.faults import Finding
from unet3d.data.raw import Header, Unreadable, read_header, voxels

MANY = 1000
"""More values than a label has classes; further ones are not collected."""

Faults = list[tuple[str, str]]
"""What is wrong, what to do."""


@dataclass(frozen=True)
class Voxels:
    """What the voxels of one case show."""

    findings: list[Finding]
    digests: dict[Path, bytes]  # of files that hold more than one value
    labels: set[int]


def contents(
    cases: Sequence[Case],
    *,
    classes: Sequence[str],
    ignore_label: int | None,
    workers: int,
    progress: Callable[[int, int], None],
) -> list[Finding]:
    """What is wrong with the voxels, and what could not be read, in the words of `headers`.

    `progress` is told how many cases are done, and of how many.
    """
    found: list[Finding] = []
    present: set[int] = set()
    first: dict[bytes, tuple[str, Path]] = {}
    look = partial(seen, classes=len(classes), ignore_label=ignore_label)
    with ThreadPoolExecutor(workers) as pool:
        for done, (case, here) in enumerate(zip(cases, pool.map(look, cases), strict=True), 1):
            found += here.findings
            present |= here.labels
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
    return found


def seen(case: Case, *, classes: int, ignore_label: int | None) -> Voxels:
    """Read the files of one case."""
    found = Voxels([], {}, set())
    for file in (*case.images, case.label):
        try:
            header = read_header(file)
            if header.dtype.kind not in "iuf":
                continue  # the header shows it
            if file == case.label:
                faults, digest, labels = label_faults(file, header, classes, ignore_label)
                found.labels.update(labels)
            else:
                faults, digest = image_faults(file, header)
        except Unreadable as reason:
            found.findings.append(unreadable(case, file, reason))
            continue
        found.findings.extend(
            Finding(case=case.name, file=file, what=what, do=do) for what, do in faults
        )
        if digest is not None:
            found.digests[file] = digest
    return found


def image_faults(file: Path, header: Header) -> tuple[Faults, bytes | None]:
    """Of an image, and the digest of its voxels unless it is constant."""
    low = np.full(header.num_channels, np.inf)
    high, broken, total = -low, 0, 0
    digest = blake2b(repr(header.shape).encode(), digest_size=16)
    for channel, values in voxels(file, header):
        digest.update(values.data)
        total += len(values)
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
    return faults, None if (low >= high).all() else digest.digest()


def label_faults(
    file: Path, header: Header, classes: int, ignore_label: int | None
) -> tuple[Faults, bytes | None, set[int]]:
    """Of a label, the digest of its voxels unless it is constant, and the classes in it."""
    present = np.empty(0, np.float32)
    digest = blake2b(repr(header.shape).encode(), digest_size=16)
    for _, values in voxels(file, header):
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
        what = f"holds {few(finite[~whole])}: labels must be whole numbers"
        faults.append((what, "label again, or resample without interpolating between labels"))
    if outside:
        ignored = "" if ignore_label is None else f" or {ignore_label} (ignored)"
        what = f"holds {few(outside)}: labels must be 0..{classes - 1}{ignored}"
        faults.append((what, "correct the label, the classes, or data.ignore_label"))
    return faults, digest.digest() if len(present) > 1 else None, labels & set(range(classes))


def few(values: Sequence[float] | np.ndarray) -> str:
    """The first five.

    >>> few([0.5, 7])
    '0.5, 7'
    """
    more = "" if len(values) <= 5 else f" and {len(values) - 5} more"
    return ", ".join(f"{v:g}" for v in values[:5]) + more
