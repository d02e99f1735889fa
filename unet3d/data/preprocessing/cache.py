"""Cache preprocessed volumes on disk; runs, ranks and workers share them."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2s
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.case import Case
from unet3d.data.findings import collect_findings
from unet3d.data.formats.volumes import open_header
from unet3d.data.preprocessing.contents import ContentDigests
from unet3d.data.preprocessing.entry import (
    DamagedEntryError,
    map_array,
    read_entry,
    refuse_incomplete_values,
    verify_arrays,
    write_entry,
)
from unet3d.data.preprocessing.lock import lock_cache
from unet3d.data.preprocessing.pipeline import (
    PREPROCESSING_VERSION,
    Preprocessing,
    preprocess_case,
)
from unet3d.data.preprocessing.resampling import (
    compute_resampled_shape,
    find_orientation,
    get_spacing,
)
from unet3d.data.preprocessing.statistics import PERCENTILES, Statistics
from unet3d.errors import UsageError
from unet3d.files import shorten_name
from unet3d.text import join_first
from unet3d.types import IGNORE_LABEL
from unet3d.units import MIB, format_bytes

POINTS_PER_CLASS = 2000
"""Voxels of each class that are stored as centers for sampling patches."""

CROPPED = 8
"""How many times smaller than its estimate a case may be once it is cropped to its foreground."""

ARRAYS = {"image": ("<f4", 4), "label": ("|u1", 3), "foreground_points": ("<i4", 2)}
"""The arrays of a cached volume with their dtypes and numbers of axes."""

NAME_BYTES = 128
"""Bytes of a case's name in the name of its folder, which file systems limit to 255."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VolumeSummary:
    """What a run asks of every case, noted when its arrays are written or verified."""

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

    What is in the cache is verified, and preprocessed again if it is damaged. All cases are tried
    before the problems of any are raised. One case per core is preprocessed at a time, or fewer if
    half of the available `ram` does not hold them. A case that `ram` does not hold is refused.
    """
    cache.mkdir(parents=True, exist_ok=True)
    digests = ContentDigests(cache)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        names = [case.name for case in cases]
        contents = collect_findings(pool, lambda case: digest_files(case, digests), cases, names)
        folders = [
            cache / f"{shorten_name(case.name, NAME_BYTES)}-{make_cache_key(digest, preprocessing)}"
            for case, digest in zip(cases, contents, strict=True)
        ]
        verified = list(pool.map(lambda f: _try_verify(f, preprocessing), folders))
    digests.save()
    damaged = [
        f"{case.name} ({result})"
        for case, result in zip(cases, verified, strict=True)
        if isinstance(result, str)
    ]
    if damaged:
        log.warning("damaged in the cache, preprocessing again: %s", join_first(damaged))
    summaries = {n: v for n, v in enumerate(verified) if isinstance(v, VolumeSummary)}
    missing = [n for n in range(len(cases)) if n not in summaries]
    if missing:
        names = [cases[n].name for n in missing]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            costs = collect_findings(
                pool, lambda n: _estimate_cost(cases[n], preprocessing, ram), missing, names
            )
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
            made = collect_findings(
                pool,
                lambda n: _preprocess(cases[n], folders[n], preprocessing),
                missing,
                names,
            )
        summaries |= zip(missing, made, strict=True)
    return [
        CachedVolume(case, folders[n], summaries[n], contents[n]) for n, case in enumerate(cases)
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


def digest_files(case: Case, digests: ContentDigests) -> tuple[str, ...]:
    """Return a digest of each file of a case: of its contents, not its path."""
    return tuple(digests.digest(file) for file in (*case.images, case.label))


def make_cache_key(contents: Sequence[str], preprocessing: Preprocessing) -> str:
    """Return a key of the files' contents, the settings and the code."""
    parts = [preprocessing.to_dict(), PREPROCESSING_VERSION, list(ARRAYS), *contents]
    return blake2s(json.dumps(parts).encode(), digest_size=8).hexdigest()


def verify_volume(folder: Path, preprocessing: Preprocessing) -> VolumeSummary:
    """Read all of a folder of the cache; raise DamagedEntryError if it cannot be used."""
    with refuse_incomplete_values():
        entry = read_entry(folder)
        records = entry["arrays"]
        _check_records(records)
        statistics = Statistics.from_dict(entry["values"]["statistics"])
        label, points = np.empty((0, 0, 0), np.uint8), np.empty((0, 4), np.int32)
        _check_statistics(statistics, channels=records["image"]["shape"][0])
        for name, array in verify_arrays(folder, entry):
            _check_values(name, array, records["label"]["shape"], preprocessing)
            label = array if name == "label" else label
            points = array if name == "foreground_points" else points
        if not np.array_equal(label[tuple(points[:, 1:].T)], points[:, 0]):
            raise DamagedEntryError("foreground_points.npy holds points of other classes")
    return _summarize(records["label"]["shape"], points, statistics)


def _summarize(shape: Sequence[int], points: np.ndarray, statistics: Statistics) -> VolumeSummary:
    classes = frozenset(np.unique(points[:, 0]).tolist())
    return VolumeSummary(shape=tuple(shape), classes=classes, statistics=statistics)


def _try_verify(folder: Path, preprocessing: Preprocessing) -> VolumeSummary | str | None:
    """Return the summary of a folder, or why it cannot be used; None if it is missing."""
    if not os.path.lexists(folder):
        return None
    try:
        return verify_volume(folder, preprocessing)
    except DamagedEntryError as error:
        return str(error)


def _check_statistics(statistics: Statistics, channels: int) -> None:
    lists = (statistics.spacing_mm, statistics.extent_mm, statistics.percentiles)
    arrays = [np.array(values) for values in lists]
    if [array.shape for array in arrays] != [(3,), (3,), (channels, len(PERCENTILES))] or any(
        array.dtype.kind not in "if" for array in arrays
    ):
        raise DamagedEntryError(f"its statistics are not those of {channels} channels")
    if not all(np.isfinite(array).all() for array in arrays) or arrays[0].min() <= 0:
        raise DamagedEntryError("its statistics are not finite, or its spacing is not above 0")


def _check_records(records: Mapping[str, Any]) -> None:
    if set(records) != set(ARRAYS):
        raise DamagedEntryError("it holds other arrays")
    for name, (dtype, ndim) in ARRAYS.items():
        if records[name]["dtype"] != dtype or len(records[name]["shape"]) != ndim:
            raise DamagedEntryError(f"{name}.npy must have {ndim} axes of {dtype}")
    if records["image"]["shape"][1:] != records["label"]["shape"]:
        raise DamagedEntryError("image.npy and label.npy have different shapes")


def _check_values(
    name: str, array: np.ndarray, shape: Sequence[int], preprocessing: Preprocessing
) -> None:
    num_classes = preprocessing.num_classes
    if name == "image" and not is_finite(array):
        raise DamagedEntryError("image.npy holds NaN or infinity")
    if name == "label":
        # np.bincount makes eight bytes of each voxel, so it gets a plane of those that need it.
        planes = [] if array.max(initial=0) < num_classes else array
        labels = {
            n for plane in planes for n in np.flatnonzero(np.bincount(plane.ravel())).tolist()
        }
        ignored = {IGNORE_LABEL} if preprocessing.ignore_labels else set()
        if any(label >= num_classes for label in labels - ignored):
            raise DamagedEntryError(f"label.npy holds labels of {num_classes} or above")
    if name == "foreground_points" and not (
        array.shape[1] == 4
        and ((array >= 0) & (array < [num_classes, *shape])).all()
        and (np.diff(array[:, 0]) >= 0).all()
    ):
        raise DamagedEntryError("foreground_points.npy holds points outside of the volume")


def is_finite(array: np.ndarray) -> bool:
    """Return whether an array holds no NaN and no infinity; its extremes tell, without a copy."""
    return not array.size or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _preprocess(case: Case, folder: Path, preprocessing: Preprocessing) -> VolumeSummary:
    def is_usable(folder: Path) -> bool:
        return isinstance(_try_verify(folder, preprocessing), VolumeSummary)

    with lock_cache(folder, is_usable) as draft:
        if draft is None:  # another process has made it
            return verify_volume(folder, preprocessing)
        scan, label = preprocess_case(case, preprocessing)
        if not is_finite(scan.image):
            raise UsageError(
                f"{case.images[0]}: preprocessing makes infinite values of it: its values "
                "are too large"
            )
        arrays = {
            "image": scan.image,
            "label": label,
            "foreground_points": _sample_foreground_points(label),
        }
        statistics = scan.statistics
        write_entry(draft, arrays, {"statistics": asdict(statistics)}, folder.name)
    return _summarize(label.shape, arrays["foreground_points"], statistics)


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
