"""Fingerprint a dataset: sizes, spacings, intensities and class frequencies."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2s
from os import cpu_count
from pathlib import Path

import numpy as np

from unet3d.data.case import Case
from unet3d.data.findings import collect_findings
from unet3d.data.formats.volume_format import Grid
from unet3d.data.formats.volumes import open_header
from unet3d.data.preprocessing.contents import digest_cases
from unet3d.data.preprocessing.entry import (
    find_entry,
    lock_cache,
    map_array,
    read_entry,
    verify_arrays,
    write_entry,
)
from unet3d.data.preprocessing.pipeline import (
    AUTO,
    PREPROCESSING_VERSION,
    Background,
    Intensity,
    find_background,
    read_channels,
    read_label,
)
from unet3d.data.preprocessing.resampling import (
    FileGrid,
    crop,
    find_nonzero_box,
    find_orientation,
    get_spacing,
    reorient,
)
from unet3d.data.preprocessing.statistics import to_tuples

MAX_SAMPLES = 10_000
"""Foreground voxels per case whose intensities are sampled."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CaseFingerprint:
    """The fingerprint of a case after reorientation and cropping to the foreground."""

    shape: tuple[int, ...]
    crop_fraction: float  # fraction of the file's voxels that the crop keeps
    spacing_mm: tuple[float, ...]
    voxels: dict[int, int]  # of each label
    intensities: np.ndarray  # (C, N): of sampled foreground voxels
    background: tuple[float, ...]  # of each channel


def compute_median_spacing(cases: Sequence[Case], code: str) -> tuple[float, float, float]:
    """Compute the median spacing along each axis from the headers."""
    spacings = []
    for case in cases:
        affine = open_header(case.images[0]).affine
        spacings.append(get_spacing(affine, find_orientation(affine, code)[0]))
    d, h, w = np.median(spacings, axis=0)
    return float(d), float(h), float(w)


def fingerprint_dataset(
    cases: Sequence[Case], code: str, cache: Path, background: Background = (AUTO,)
) -> list[CaseFingerprint]:
    """Return the fingerprint of every case, from the cache if it is there.

    All cases are tried before the problems of any are raised.
    """
    folder = cache / "fingerprints"
    folder.mkdir(parents=True, exist_ok=True)
    folders = {}
    for case, digests in zip(cases, digest_cases(cases, cache), strict=True):
        parts = [PREPROCESSING_VERSION, code, background, *digests]
        key = blake2s(json.dumps(parts).encode(), digest_size=16).hexdigest()
        folders[case] = folder / key
    missing = [case for case in cases if find_entry(folders[case], _load) is None]
    if missing:
        log.info("reading %d cases for the dataset's fingerprint", len(missing))
        threads = min(4, cpu_count() or 1)
        collect_findings(
            lambda case: _make(case, folders[case], code, background), missing, threads=threads
        )
    return [_load(folders[case]) for case in cases]


def compute_foreground_intensities(
    fingerprints: Sequence[CaseFingerprint],
) -> tuple[Intensity, ...]:
    """Return each channel's foreground statistics over all cases, for `normalize=ct`."""
    values = np.concatenate([f.intensities for f in fingerprints], axis=1).astype(float)
    if not values.size:
        return tuple((0.0, 1.0, -np.inf, np.inf) for _ in values)
    low, high = np.percentile(values, (0.5, 99.5), axis=1)
    rows = zip(values.mean(1), values.std(1), low, high, strict=True)
    return tuple((float(m), float(s), float(a), float(b)) for m, s, a, b in rows)


def _make(case: Case, folder: Path, code: str, background: Background) -> None:
    with lock_cache(folder, _load) as draft:
        if draft is not None:  # else another process has made it
            values = asdict(fingerprint_case(case, code, background))
            write_entry(draft, {"intensities": values.pop("intensities")}, values)


def _load(folder: Path) -> CaseFingerprint:
    """Read a fingerprint and compare it with its checksum."""
    verify_arrays(folder)
    values = {key: to_tuples(value) for key, value in read_entry(folder)["values"].items()}
    values["voxels"] = {int(label): count for label, count in values["voxels"].items()}
    return CaseFingerprint(**values, intensities=np.array(map_array(folder, "intensities")))


def fingerprint_case(case: Case, code: str, background: Background = (AUTO,)) -> CaseFingerprint:
    """Read a case and compute its fingerprint."""
    channels, affine = read_channels(case.images)
    labels = read_label(case.label, Grid(shape=channels.shape[1:], affine=affine))
    axes, flips = find_orientation(affine, code)
    channels, labels = (reorient(a, axes, flips) for a in (channels, labels))
    values = find_background(channels, background)
    box = find_nonzero_box(channels, values)
    grid = FileGrid(file_shape=labels.shape, axes=axes, flips=flips, box=box, shape=labels.shape)
    channels, labels = crop(channels, grid), crop(labels, grid)
    foreground = np.nonzero(labels > 0)
    if len(foreground[0]) > MAX_SAMPLES:
        chosen = np.random.default_rng(0).choice(len(foreground[0]), MAX_SAMPLES, replace=False)
        foreground = tuple(indices[chosen] for indices in foreground)
    return CaseFingerprint(
        shape=labels.shape,
        crop_fraction=labels.size / float(np.prod(grid.file_shape)),
        spacing_mm=get_spacing(affine, axes),
        voxels=count_labels(labels),
        intensities=np.stack([channel[foreground] for channel in channels]).astype(np.float32),
        background=tuple(values),
    )


def count_labels(labels: np.ndarray) -> dict[int, int]:
    """Count the voxels of each label, plane by plane: sorting a whole volume needs memory."""
    total: Counter[int] = Counter()
    for plane in labels:
        values, counts = np.unique(plane, return_counts=True)
        total.update(dict(zip(map(int, values), counts.tolist(), strict=True)))
    return dict(sorted(total.items()))
