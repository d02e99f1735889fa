"""Cache preprocessed volumes on disk; runs, ranks and workers share them."""

import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2s
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.case import Case
from unet3d.data.findings import collect_findings
from unet3d.data.formats.volumes import list_files, open_header
from unet3d.data.preprocessing.lock import lock_cache
from unet3d.data.preprocessing.pipeline import Preprocessing, preprocess_case
from unet3d.data.preprocessing.resampling import (
    compute_resampled_shape,
    find_orientation,
    get_spacing,
)
from unet3d.data.preprocessing.statistics import Statistics
from unet3d.errors import UsageError
from unet3d.types import IGNORE_LABEL
from unet3d.units import MIB, format_bytes

POINTS_PER_CLASS = 2000
"""Voxels of each class that are stored as centers for sampling patches."""

HEAD_BYTES = 2**16
"""Bytes at a file's start that enter its digest, with its length and its last bytes."""

FILES = ["image", "label", "foreground_points", "statistics"]
"""The files of a cached volume; part of the cache key, so that incomplete caches are not used."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedVolume:
    """A preprocessed case; its arrays are memory-mapped."""

    case: Case
    folder: Path
    background_label: int = 0  # what a sample has as label where the case has 0

    @property
    def name(self) -> str:
        """Return the case's name."""
        return self.case.name

    @property
    def image(self) -> np.ndarray:
        """Map the image (C, D, H, W), float32."""
        return np.load(self.folder / "image.npy", mmap_mode="r")

    @property
    def label(self) -> np.ndarray:
        """Map the label (D, H, W), uint8."""
        return np.load(self.folder / "label.npy", mmap_mode="r")

    @property
    def foreground_points(self) -> np.ndarray:
        """Map (N, 4): the class and d, h, w of sampled foreground voxels, sorted by class."""
        return np.load(self.folder / "foreground_points.npy", mmap_mode="r")

    @property
    def classes(self) -> set[int]:
        """Return the foreground classes that occur."""
        return set(np.unique(self.foreground_points[:, 0]).tolist())

    @property
    def statistics(self) -> Statistics:
        """Return the statistics of the case before normalization."""
        content = (self.folder / "statistics.json").read_text("utf-8")
        return Statistics.from_dict(json.loads(content))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return (D, H, W)."""
        return self.label.shape

    def get_spacing_mm(self, preprocessing: Preprocessing) -> tuple[float, float, float]:
        """Return the spacing after preprocessing; read the file's header if it was kept."""
        if preprocessing.spacing_mm is not None:
            return preprocessing.spacing_mm
        affine = open_header(self.case.images[0]).affine
        return get_spacing(affine, find_orientation(affine, preprocessing.orientation)[0])


def preprocess_all(
    cases: Sequence[Case], preprocessing: Preprocessing, cache: Path, *, ram: int | None = None
) -> list[CachedVolume]:
    """Return every case, from the cache if it is there.

    All cases are tried before the problems of any are raised. One case per core is preprocessed at
    a time, or fewer if half of the available `ram` does not hold them.
    """
    volumes = [
        CachedVolume(c, cache / f"{c.name}-{make_cache_key(c, preprocessing)}") for c in cases
    ]
    missing = [v for v in volumes if not v.folder.exists()]
    if missing:
        cache.mkdir(parents=True, exist_ok=True)
        costs = [estimate_preprocessing_cost(v.case.images, preprocessing) for v in missing]
        threads = count_parallel_jobs(max(c.ram for c in costs), ram)
        log.info(
            "preprocessing %d cases into %s: %s of disk space, at most %s of RAM for %d at a time",
            len(missing),
            cache,
            format_bytes(sum(c.disk for c in costs)),
            format_bytes(threads * max(c.ram for c in costs)),
            threads,
        )
        with ThreadPoolExecutor(threads) as pool:
            collect_findings(
                pool, lambda v: _preprocess(v, preprocessing), missing, [v.name for v in missing]
            )
    return volumes


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


def count_parallel_jobs(cost: int, ram: int | None) -> int:
    """Return how many cases are preprocessed at a time."""
    cores = os.cpu_count() or 1
    return cores if ram is None else max(1, min(cores, ram // 2 // cost))


def make_cache_key(case: Case, preprocessing: Preprocessing) -> str:
    """Return a key of the files' contents and the settings; paths do not matter."""
    parts: list[Any] = [preprocessing.to_dict(), FILES]
    parts += [digest_contents(file) for file in (*case.images, case.label)]
    return blake2s(json.dumps(parts).encode(), digest_size=8).hexdigest()


def digest_contents(file: Path) -> list[Any]:
    """Identify a file's contents without reading all of it.

    A gzip file ends with a checksum of its contents; for others the modification time is added.
    Volumes of several files are identified by the names, sizes and times of all of them.
    """
    if not file.exists():
        raise UsageError(f"{file.absolute()} is missing")
    parts = list_files(file)
    if parts != [file]:
        stats = [(part.relative_to(file.parent), part.stat()) for part in parts]
        return [[name.as_posix(), stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    with file.open("rb") as stream:
        head = blake2s(stream.read(HEAD_BYTES)).hexdigest()
        length = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, length - 8))
        tail = stream.read().hex()
    return [length, head, tail] + ([] if file.suffix == ".gz" else [file.stat().st_mtime_ns])


def _preprocess(volume: CachedVolume, preprocessing: Preprocessing) -> None:
    with lock_cache(volume.folder) as draft:
        if draft is None:
            return
        scan, label = preprocess_case(volume.case, preprocessing)
        _save(draft / "image.npy", scan.image)
        _save(draft / "label.npy", label)
        _save(draft / "foreground_points.npy", _sample_foreground_points(label))
        (draft / "statistics.json").write_text(json.dumps(asdict(scan.statistics)), "utf-8")


def _save(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())


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
