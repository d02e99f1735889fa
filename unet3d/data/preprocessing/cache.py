"""Cache preprocessed volumes on disk; runs, ranks and workers share them."""

import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2s
from math import prod
from pathlib import Path

import numpy as np

from unet3d.data.case import Case
from unet3d.data.findings import collect_findings
from unet3d.data.formats.volumes import open_header
from unet3d.data.preprocessing.contents import digest_cases
from unet3d.data.preprocessing.entry import (
    find_entry,
    lock_cache,
    map_array,
    read_entry,
    write_entry,
)
from unet3d.data.preprocessing.pipeline import (
    PREPROCESSING_VERSION,
    Preprocessing,
    count_nonfinite,
    preprocess_case,
)
from unet3d.data.preprocessing.resampling import (
    compute_resampled_shape,
    find_orientation,
    get_spacing,
)
from unet3d.data.preprocessing.statistics import Statistics, to_tuples
from unet3d.errors import UsageError
from unet3d.text import MIB, format_bytes
from unet3d.types import IGNORE_LABEL

POINTS_PER_CLASS = 2000
"""Voxels of each class that are stored as centers for sampling patches."""

CROPPED = 8
"""How many times smaller than its estimate a case may be once it is cropped to its foreground."""

ARRAYS = ("image", "label", "foreground_points")
"""The arrays of a cached volume."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VolumeSummary:
    """What the start of a run asks of every case."""

    shape: tuple[int, ...]  # (D, H, W)
    classes: frozenset[int]  # foreground classes that occur
    statistics: Statistics  # before normalization


@dataclass(frozen=True)
class CachedVolume:
    """A preprocessed case; its arrays are memory-mapped."""

    case: Case
    folder: Path
    summary: VolumeSummary
    contents: tuple[str, ...] = ()  # digests of the files that it was made of
    background_label: int = 0  # what a sample has as label where the case has 0

    @property
    def name(self) -> str:
        """Return the case's name."""
        return self.case.name

    @property
    def image(self) -> np.ndarray:
        """Map the image (C, D, H, W), float32."""
        return map_array(self.folder, "image")

    @property
    def label(self) -> np.ndarray:
        """Map the label (D, H, W), uint8."""
        return map_array(self.folder, "label")

    @property
    def foreground_points(self) -> np.ndarray:
        """Map (N, 4): the class and d, h, w of sampled foreground voxels, sorted by class."""
        return map_array(self.folder, "foreground_points")

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (D, H, W)."""
        return self.summary.shape

    def get_spacing_mm(self, preprocessing: Preprocessing) -> tuple[float, float, float]:
        """Return the spacing after preprocessing: the file's if it was kept."""
        return preprocessing.spacing_mm or self.summary.statistics.spacing_mm


def preprocess_all(
    cases: Sequence[Case], preprocessing: Preprocessing, cache: Path, *, ram: int | None = None
) -> list[CachedVolume]:
    """Return every case, from the cache if it is there.

    All cases are tried before the problems of any are raised. One case per core is preprocessed at
    a time, or fewer if half of the available `ram` does not hold them. A case that `ram` does not
    hold is refused. Arrays are compared with their checksums when a run first reads them.
    """
    contents = digest_cases(cases, cache)
    folders = [
        cache / f"{case.name}-{make_cache_key(digest, preprocessing)}"
        for case, digest in zip(cases, contents, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        summaries = list(pool.map(lambda folder: find_entry(folder, read_summary), folders))
    found = zip(cases, folders, summaries, strict=True)
    missing = {case: folder for case, folder, summary in found if summary is None}
    for folder in missing.values():
        if folder.exists():
            log.warning("%s is damaged, preprocessing the case again", folder)
    if missing:
        costs = collect_findings(lambda case: _estimate_cost(case, preprocessing, ram), [*missing])
        threads = count_parallel_jobs(max(c.ram for c in costs), ram)
        log.info(
            "preprocessing %d cases into %s: %s of disk space, at most %s of RAM for %d at a time",
            len(missing),
            cache,
            format_bytes(sum(c.disk for c in costs)),
            format_bytes(threads * max(c.ram for c in costs)),
            threads,
        )
        collect_findings(
            lambda c: _preprocess(c, missing[c], preprocessing), [*missing], threads=threads
        )
    return [
        CachedVolume(case, folder, summary or read_summary(folder), digest)
        for case, folder, summary, digest in zip(cases, folders, summaries, contents, strict=True)
    ]


@dataclass(frozen=True)
class PreprocessingCost:
    """Bytes that preprocessing a case needs."""

    ram: int
    disk: int


def estimate_preprocessing_cost(
    files: Sequence[Path], preprocessing: Preprocessing
) -> PreprocessingCost:
    """Return an upper bound from the headers; how much is cropped is not known yet."""
    headers = [open_header(file) for file in files]
    shapes = [header.shape for header in headers]
    channels = sum(s[3] if len(s) == 4 else 1 for s in shapes)
    axes, _ = find_orientation(headers[0].affine, preprocessing.orientation)
    old_mm = get_spacing(headers[0].affine, axes)
    shape = compute_resampled_shape(
        [shapes[0][a] for a in axes], old_mm, preprocessing.spacing_mm or old_mm
    )
    old, new = prod(shapes[0][:3]), prod(shape)
    item = max(4, *(header.dtype.itemsize for header in headers))
    reading = item * channels * old * (2 if len(headers) > 1 else 1)
    buffer = max(header.buffer_bytes for header in headers)
    resampling = 4 * (2 * old + 2 * max(old, new)) + 4 * channels * new
    ram = reading + max(buffer, resampling) + 8 * MIB
    return PreprocessingCost(ram=ram, disk=(4 * channels + 1) * new)


def _estimate_cost(case: Case, preprocessing: Preprocessing, ram: int | None) -> PreprocessingCost:
    """Return the cost of a case; refuse one that `ram` does not hold, even if it is cropped."""
    cost = estimate_preprocessing_cost(case.images, preprocessing)
    if ram is not None and cost.ram > CROPPED * ram:
        raise UsageError(
            f"{case.images[0]} takes up to {format_bytes(cost.ram)} of RAM to preprocess, "
            f"{format_bytes(ram)} are available: correct the voxel spacing in its header, or set a "
            "larger data.spacing_mm"
        )
    return cost


def count_parallel_jobs(cost: int, ram: int | None) -> int:
    """Return how many cases are preprocessed at a time."""
    cores = os.cpu_count() or 1
    return cores if ram is None else max(1, min(cores, ram // 2 // cost))


def make_cache_key(contents: Sequence[str], preprocessing: Preprocessing) -> str:
    """Return a key of the files' contents, the settings and the code."""
    parts = [preprocessing.to_dict(), PREPROCESSING_VERSION, list(ARRAYS), *contents]
    return blake2s(json.dumps(parts).encode(), digest_size=8).hexdigest()


def read_summary(folder: Path) -> VolumeSummary:
    """Read what a folder of the cache says of its case."""
    entry = read_entry(folder)
    statistics = {key: to_tuples(v) for key, v in entry["values"]["statistics"].items()}
    return VolumeSummary(
        shape=tuple(entry["arrays"]["label"]["shape"]),
        classes=frozenset(np.unique(map_array(folder, "foreground_points")[:, 0]).tolist()),
        statistics=Statistics(**statistics),
    )


def _preprocess(case: Case, folder: Path, preprocessing: Preprocessing) -> None:
    with lock_cache(folder, read_summary) as draft:
        if draft is None:  # another process has made it
            return
        scan, label = preprocess_case(case, preprocessing)
        if any(map(count_nonfinite, scan.image)):
            raise UsageError(
                f"{case.images[0]}: preprocessing makes infinite values of it: its values "
                "are too large"
            )
        points = _sample_foreground_points(label)
        arrays = dict(zip(ARRAYS, (scan.image, label, points), strict=True))
        write_entry(draft, arrays, {"statistics": asdict(scan.statistics)})


def _sample_foreground_points(label: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = [np.empty((0, 4), np.int32)]
    for c in np.unique(label):
        if c in (0, IGNORE_LABEL):
            continue
        points = np.argwhere(label == c)
        if len(points) > POINTS_PER_CLASS:
            points = points[np.sort(rng.choice(len(points), POINTS_PER_CLASS, replace=False))]
        rows.append(np.insert(points, 0, c, axis=1).astype(np.int32))
    return np.concatenate(rows)
