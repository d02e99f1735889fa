"""Prepared volumes on disk: each made once, shared by runs, ranks and workers, read by patches."""

import fcntl
import json
import logging
import os
import shutil
from bisect import bisect_right
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2s
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.case import Case
from unet3d.data.findings import collect_findings
from unet3d.data.nifti.reader import open_image, volume_shape
from unet3d.data.preprocessing.pipeline import Preprocessing, preprocess_case
from unet3d.data.preprocessing.resampling import compute_resampled_shape, orientation, spacing
from unet3d.data.preprocessing.statistics import Statistics
from unet3d.errors import UsageError
from unet3d.types import IGNORE_LABEL
from unet3d.units import MIB, format_bytes

PLACES_PER_CLASS = 2000
"""So many voxels of each class are remembered, for sampling patches around them."""

HEAD = 2**16
"""Bytes at a file's start that tell its content, beside its length and gzip's checksum."""

FILES = ["image", "label", "places", "statistics"]
"""What lies in a volume's folder: a cache from before one of them was written is not used."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedVolume:
    """A prepared case; the arrays are mapped from disk, not loaded."""

    case: Case
    folder: Path

    @property
    def name(self) -> str:
        """The case's."""
        return self.case.name

    @property
    def image(self) -> np.ndarray:
        """(C, D, H, W), float32."""
        return np.load(self.folder / "image.npy", mmap_mode="r")

    @property
    def label(self) -> np.ndarray:
        """(D, H, W), uint8."""
        return np.load(self.folder / "label.npy", mmap_mode="r")

    @property
    def foreground_points(self) -> np.ndarray:
        """(N, 4): class, then d, h, w, of some voxels of each foreground class; sorted by class."""
        return np.load(self.folder / "places.npy", mmap_mode="r")

    @property
    def classes(self) -> set[int]:
        """The foreground classes that it has, by a few looks at its places."""
        sorted_classes, found, start = self.foreground_points[:, 0], set(), 0
        while start < len(sorted_classes):
            found.add(int(sorted_classes[start]))
            start = bisect_right(sorted_classes, sorted_classes[start])
        return found

    @property
    def statistics(self) -> Statistics:
        """Of the case before it was normalized."""
        return Statistics.from_dict(json.loads((self.folder / "statistics.json").read_text()))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """D, H, W."""
        return self.label.shape

    def spacing_mm(self, preparation: Preprocessing) -> tuple[float, float, float]:
        """Of its voxels, by what prepared it and the file's header."""
        if preparation.spacing_mm is not None:
            return preparation.spacing_mm
        affine = open_image(self.case.images[0]).affine
        return spacing(affine, orientation(affine, preparation.orientation)[0])


def preprocess_all(
    cases: Sequence[Case], preparation: Preprocessing, cache: Path, *, ram: int | None = None
) -> list[CachedVolume]:
    """Every case, from the cache or prepared now; all of them are tried before faults are raised.

    As many are prepared at a time as there are cores, if half of the free `ram` holds them.
    """
    volumes = [CachedVolume(c, cache / f"{c.name}-{make_cache_key(c, preparation)}") for c in cases]
    missing = [v for v in volumes if not v.folder.exists()]
    if missing:
        cache.mkdir(parents=True, exist_ok=True)
        costs = [estimate_cost(v.case.images, preparation) for v in missing]
        threads = count_parallel_jobs(max(c.ram for c in costs), ram)
        log.info(
            "preparing %d cases into %s: %s on disk, at most %s of RAM for %d at a time",
            len(missing),
            cache,
            format_bytes(sum(c.disk for c in costs)),
            format_bytes(threads * max(c.ram for c in costs)),
            threads,
        )
        with ThreadPoolExecutor(threads) as pool:
            collect_findings(
                pool, lambda v: _make(v, preparation), missing, [v.name for v in missing]
            )
    return volumes


@dataclass(frozen=True)
class PreprocessingCost:
    """Bytes that preparing a case takes, from its headers alone."""

    ram: int
    disk: int


def estimate_cost(files: Sequence[Path], preparation: Preprocessing) -> PreprocessingCost:
    """An upper bound: the box around what is not zero is not known yet."""
    images = [open_image(file) for file in files]
    shapes = [volume_shape(image) for image in images]
    channels = sum(s[3] if len(s) == 4 else 1 for s in shapes)
    axes, _ = orientation(images[0].affine, preparation.orientation)
    old_mm = spacing(images[0].affine, axes)
    shape = compute_resampled_shape(
        [shapes[0][a] for a in axes], old_mm, preparation.spacing_mm or old_mm
    )
    old, new = prod(shapes[0][:3]), prod(shape)
    item = max(4, *(image.get_data_dtype().itemsize for image in images))
    reading = item * channels * old * (2 if len(images) > 1 else 1)
    resampling = 4 * (2 * old + 2 * max(old, new)) + 4 * channels * new
    return PreprocessingCost(ram=reading + resampling + 8 * MIB, disk=(4 * channels + 1) * new)


def count_parallel_jobs(cost: int, ram: int | None) -> int:
    """How many cases are prepared at a time."""
    cores = os.cpu_count() or 1
    return cores if ram is None else max(1, min(cores, ram // 2 // cost))


def make_cache_key(case: Case, preparation: Preprocessing) -> str:
    """By content and settings; where the files lie and what they are called does not matter."""
    told: list[Any] = [preparation.to_dict(), FILES]
    told += [digest_contents(file) for file in (*case.images, case.label)]
    return blake2s(json.dumps(told).encode(), digest_size=8).hexdigest()


def digest_contents(file: Path) -> list[Any]:
    """What tells a file from another without reading all of it.

    A gzip file ends with the checksum of all it holds; of others the time of writing counts too.
    """
    if not file.is_file():
        raise UsageError(f"{file.absolute()} is missing")
    with file.open("rb") as stream:
        head = blake2s(stream.read(HEAD)).hexdigest()
        length = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, length - 8))
        tail = stream.read().hex()
    return [length, head, tail] + ([] if file.suffix == ".gz" else [file.stat().st_mtime_ns])


def _make(volume: CachedVolume, preparation: Preprocessing) -> None:
    with lock_cache(volume.folder) as draft:
        if draft is None:
            return
        scan, label = preprocess_case(volume.case, preparation)
        _save(draft / "image.npy", scan.image)
        _save(draft / "label.npy", label)
        _save(draft / "places.npy", _places(label))
        (draft / "statistics.json").write_text(json.dumps(asdict(scan.statistics)))


@contextmanager
def lock_cache(folder: Path) -> Generator[Path | None]:
    """An empty folder that becomes `folder` when all went well; None if it is there already.

    Whoever else wants the same folder waits, be it a thread, a rank or another run; what a killed
    process left behind is used anew.
    """
    draft = folder.with_name(f".{folder.name}")
    while not folder.exists():
        draft.mkdir(exist_ok=True)
        handle = os.open(draft, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # the system lets go of it when a process dies
            if not _same(handle, draft):
                continue  # it has become the folder, or was given up, while we waited
            if folder.exists():  # between our asking and our making the draft
                shutil.rmtree(draft)
                break
            for leftover in draft.iterdir():
                leftover.unlink()
            try:
                yield draft
                draft.rename(folder)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
            return
        finally:
            os.close(handle)
    yield None


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _save(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())


def _places(label: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = [np.empty((0, 4), np.int32)]
    for c in np.unique(label):
        if c in (0, IGNORE_LABEL):
            continue
        where = np.argwhere(label == c)
        if len(where) > PLACES_PER_CLASS:
            where = where[np.sort(rng.choice(len(where), PLACES_PER_CLASS, replace=False))]
        rows.append(np.insert(where, 0, c, axis=1).astype(np.int32))
    return np.concatenate(rows)
