"""What a data set is like: sizes, spacings, intensities, shares of the classes."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2s
from os import cpu_count
from pathlib import Path

import numpy as np

from unet3d.data.case import Case
from unet3d.data.findings import collect_findings
from unet3d.data.nifti.reader import open_image
from unet3d.data.preprocessing.background import AUTO, Background, find_background
from unet3d.data.preprocessing.cache import digest_contents, lock_cache
from unet3d.data.preprocessing.pipeline import Intensity, read_channels, read_label
from unet3d.data.preprocessing.resampling import crop, nonzero_box, orientation, reorient, spacing
from unet3d.types import FileGrid

SAMPLES = 10_000
"""Foreground voxels of a case whose intensities are looked at."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CaseFingerprint:
    """Of one case, in its orientation and within the box of what is not background."""

    shape: tuple[int, ...]
    kept: float  # the box's share of the file's volume
    spacing_mm: tuple[float, ...]
    voxels: dict[int, int]  # of each label
    intensities: np.ndarray  # (C, N): of some foreground voxels
    background: tuple[float, ...]  # of each channel


def median_spacing(cases: Sequence[Case], code: str) -> tuple[float, float, float]:
    """The median along each axis, from the headers alone."""
    found = []
    for case in cases:
        affine = open_image(case.images[0]).affine
        found.append(spacing(affine, orientation(affine, code)[0]))
    d, h, w = np.median(found, axis=0)
    return float(d), float(h), float(w)


def fingerprint_dataset(
    cases: Sequence[Case], code: str, cache: Path, background: Background = (AUTO,)
) -> list[CaseFingerprint]:
    """Of every case, from the cache or read now; all of them are tried before faults are raised."""
    keys = [_key(case, code, background) for case in cases]
    folders = [
        cache / "fingerprints" / f"{c.name}-{key}" for c, key in zip(cases, keys, strict=True)
    ]
    missing = [(c, f) for c, f in zip(cases, folders, strict=True) if not f.exists()]
    if missing:
        (cache / "fingerprints").mkdir(parents=True, exist_ok=True)
        log.info("reading %d cases for the data set's fingerprint", len(missing))
        with ThreadPoolExecutor(min(4, cpu_count() or 1)) as pool:
            names = [case.name for case, _ in missing]
            collect_findings(pool, lambda m: _make(*m, code, background), missing, names)
    return [_load(folder) for folder in folders]


def foreground_intensities(prints: Sequence[CaseFingerprint]) -> tuple[Intensity, ...]:
    """Of each channel, over the foreground of all cases: what `normalize=ct` needs."""
    together = np.concatenate([p.intensities for p in prints], axis=1).astype(float)
    if not together.size:
        return tuple((0.0, 1.0, -np.inf, np.inf) for _ in together)
    low, high = np.percentile(together, (0.5, 99.5), axis=1)
    figures = zip(together.mean(1), together.std(1), low, high, strict=True)
    return tuple((float(m), float(s), float(a), float(b)) for m, s, a, b in figures)


def _key(case: Case, code: str, background: Background) -> str:
    told = [code, background, *(digest_contents(file) for file in (*case.images, case.label))]
    return blake2s(json.dumps(told).encode(), digest_size=8).hexdigest()


def _make(case: Case, folder: Path, code: str, background: Background) -> None:
    with lock_cache(folder) as draft:
        if draft is None:
            return
        found = fingerprint_case(case, code, background)
        np.save(draft / "intensities.npy", found.intensities)
        (draft / "print.json").write_text(
            json.dumps(
                {
                    "shape": found.shape,
                    "kept": found.kept,
                    "spacing_mm": found.spacing_mm,
                    "voxels": found.voxels,
                    "background": found.background,
                }
            )
        )


def _load(folder: Path) -> CaseFingerprint:
    told = json.loads((folder / "print.json").read_text())
    return CaseFingerprint(
        shape=tuple(told["shape"]),
        kept=told["kept"],
        spacing_mm=tuple(told["spacing_mm"]),
        voxels={int(k): v for k, v in told["voxels"].items()},
        intensities=np.load(folder / "intensities.npy"),
        background=tuple(told["background"]),
    )


def fingerprint_case(case: Case, code: str, background: Background = (AUTO,)) -> CaseFingerprint:
    """Read a case's files."""
    channels, affine = read_channels(case.images)
    labels = read_label(case.label, channels.shape[1:])
    axes, flips = orientation(affine, code)
    channels, labels = (reorient(a, axes, flips) for a in (channels, labels))
    values = find_background(channels, background)
    box = nonzero_box(channels, values)
    grid = FileGrid(file_shape=labels.shape, axes=axes, flips=flips, box=box, shape=labels.shape)
    channels, labels = crop(channels, grid), crop(labels, grid)
    there = np.nonzero(labels > 0)
    if len(there[0]) > SAMPLES:
        chosen = np.random.default_rng(0).choice(len(there[0]), SAMPLES, replace=False)
        there = tuple(along[chosen] for along in there)
    return CaseFingerprint(
        shape=labels.shape,
        kept=labels.size / float(np.prod(grid.file_shape)),
        spacing_mm=spacing(affine, axes),
        voxels=count_labels(labels),
        intensities=np.stack([channel[there] for channel in channels]).astype(np.float32),
        background=tuple(values),
    )


def count_labels(labels: np.ndarray) -> dict[int, int]:
    """Count the voxels of each label: a row of bytes is counted without sorting it."""
    found: Counter[int] = Counter()
    for row in labels:
        if row.dtype == np.uint8:
            counts = np.bincount(row.ravel("K"))
            values = np.flatnonzero(counts)
            counts = counts[values]
        else:
            values, counts = np.unique(row, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            found[int(value)] += count
    return dict(sorted(found.items()))
