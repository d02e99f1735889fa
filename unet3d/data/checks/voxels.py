"""Check the voxels of a dataset: read every file completely."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from unet3d.data.annotated import Annotations
from unet3d.data.case import Case
from unet3d.data.checks.headers import is_3d, make_unreadable_finding
from unet3d.data.findings import Finding
from unet3d.data.formats.volume_format import UnreadableFileError, iter_slabs
from unet3d.data.formats.volumes import find_format, read_header
from unet3d.data.preprocessing.channels import find_border_value
from unet3d.data.preprocessing.pipeline import AUTO, Background, count_nonfinite, repeat_per_channel
from unet3d.text import join_first

MAX_VALUES = 1000
"""Distinct values of a label file that are collected; no dataset has as many classes."""

Problems = list[tuple[str, str]]
"""(problem, fix) pairs."""


@dataclass(frozen=True)
class CaseVoxels:
    """The result of reading the voxels of one case."""

    findings: list[Finding]
    digests: dict[Path, bytes]  # of files that are not constant
    labels: set[int]
    borders: list[float | None]  # constant border value of each channel


def check_voxels(
    cases: Sequence[Case],
    *,
    classes: Sequence[str],
    ignore_labels: Sequence[int],
    annotations: Annotations | None = None,
    channels: Sequence[str] = (),
    background: Background = (0,),
    workers: int,
    progress: Callable[[int, int], None],
) -> list[Finding]:
    """Return the problems of the voxels, and of unreadable files in the words of `check_headers`.

    `progress` is called with (cases done, cases in total).
    """
    findings: list[Finding] = []
    present: set[int] = set()
    first_users: dict[bytes, tuple[str, Path]] = {}
    borders: list[list[float]] = []  # of each case with constant ones that are not background
    check = partial(check_case_voxels, classes=len(classes), ignore_labels=ignore_labels)
    with ThreadPoolExecutor(workers) as pool:
        results = zip(cases, pool.map(check, cases), strict=True)
        for done, (case, result) in enumerate(results, 1):
            findings += result.findings
            present |= result.labels
            if annotations is not None:
                problem = annotations.find_contradiction(case.name, result.labels)
                if problem is not None:
                    advice = "list the class in data.annotated, or remove the label"
                    findings.append(Finding(case.name, case.label, problem, advice))
            if unexpected := find_unexpected_borders(result.borders, channels, background):
                borders.append(unexpected)
            for file, digest in result.digests.items():
                name, twin = first_users.setdefault(digest, (case.name, file))
                if os.path.realpath(twin) != os.path.realpath(file):
                    message = f"holds the same voxels as {twin.name} of {name}"
                    advice = "replace it with the correct file, or remove one of the cases"
                    findings.append(Finding(case.name, file, message, advice))
            progress(done, len(cases))
    for label, name in enumerate(classes):
        if present and label not in present:
            message = f"class {label} ({name}) occurs in no label"
            advice = "remove it from the classes, or check the numbering of the labels"
            findings.append(Finding(None, None, message, advice))
    if borders:
        values = [value for case in borders for value in case]
        span = " to ".join(dict.fromkeys(f"{end(values):.4g}" for end in (min, max)))
        of_cases = f"{len(borders)} of {len(cases)} cases"
        message = f"{of_cases} have a constant border that is not data.background: {span}"
        advice = "set data.background=auto to exclude it from cropping and normalization"
        findings.append(Finding(None, None, message, advice, is_hint=True))
    return findings


def find_unexpected_borders(
    borders: Sequence[float | None], channels: Sequence[str], background: Background
) -> list[float]:
    """Return constant border values that are not background; in CT, air is an ordinary value."""
    values = repeat_per_channel(background, len(borders))
    return [
        border
        for border, value, name in zip(borders, values, channels, strict=False)
        if border is not None and name.upper() != "CT" and value not in (AUTO, border)
    ]


def check_case_voxels(case: Case, *, classes: int, ignore_labels: Sequence[int]) -> CaseVoxels:
    """Read and check the files of one case."""
    result = CaseVoxels([], {}, set(), [])
    for file in (*case.images, case.label):
        try:
            header = read_header(file)
            if header.dtype.kind not in "iuf" or not is_3d(header):
                continue  # check_headers reports it
            channels, _ = find_format(file).read_volume(file)
        except UnreadableFileError as error:
            result.findings.append(make_unreadable_finding(case.name, file, error))
            continue
        if file == case.label:
            problems, labels = check_label_voxels(channels, classes, ignore_labels)
            result.labels.update(labels)
        else:
            problems = check_image_voxels(channels)
            result.borders.extend(map(find_border_value, channels))
        result.findings.extend(
            Finding(case.name, file, message, advice) for message, advice in problems
        )
        if any(channel.min() < channel.max() for channel in channels):
            result.digests[file] = digest_voxels(channels)
    return result


def digest_voxels(channels: np.ndarray) -> bytes:
    """Return a digest of the values of (C, D, H, W), whatever their type and order in memory."""
    digest = blake2b(repr(channels.shape).encode(), digest_size=16)
    for channel in channels:
        for values in iter_slabs(channel):
            digest.update(values.data)
    return digest.digest()


def check_image_voxels(channels: np.ndarray) -> Problems:
    """Return the problems of (C, D, H, W)."""
    problems = []
    not_finite = sum(map(count_nonfinite, channels))
    if not_finite:
        message = f"holds NaN or infinity in {not_finite:,} of {channels.size:,} voxels"
        problems.append((message, "replace them with finite values, or remove the case"))
    for index, channel in enumerate(channels):
        low, high = channel.min(), channel.max()  # NaN if any voxel is
        if low == high:
            prefix = f"channel {index} " if len(channels) > 1 else ""
            message = f"{prefix}is {low:g} everywhere"
            problems.append((message, "replace it with the correct file, or remove the case"))
    return problems


def check_label_voxels(
    channels: np.ndarray, classes: int, ignore_labels: Sequence[int]
) -> tuple[Problems, set[int]]:
    """Return the problems of (C, D, H, W), and the classes that occur."""
    present = np.empty(0, np.float32)
    for channel in channels:
        for values in iter_slabs(channel):
            if len(present) < MAX_VALUES:
                # Labels come in runs: the last voxel of each is enough, and faster to sort.
                ends = np.append(np.flatnonzero(values[1:] != values[:-1]), len(values) - 1)
                present = np.union1d(present, values[ends])
    finite = present[np.isfinite(present)]
    is_integer = finite == np.round(finite)
    labels = {int(v) for v in finite[is_integer]}
    unknown = sorted(labels - set(range(classes)) - {*ignore_labels})
    problems = []
    if len(finite) < len(present):
        problems.append(("holds NaN or infinity", "replace them with labels"))
    if not is_integer.all():
        fractional = join_first([f"{v:g}" for v in finite[~is_integer]])
        advice = "annotate again, or resample without interpolating between labels"
        problems.append((f"holds {fractional}: labels must be integers", advice))
    if unknown:
        ignored = "".join(f" or {label} (ignored)" for label in ignore_labels)
        found = join_first(list(map(str, unknown)))
        message = f"holds {found}: labels must be 0..{classes - 1}{ignored}"
        problems.append((message, "correct the label, the classes, or data.ignore_label"))
    return problems, labels & set(range(classes))
