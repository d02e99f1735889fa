"""Cache preprocessed volumes on disk, by the contents of their files and the settings.

Runs, ranks and workers share the cache: one of them fills a folder, the others wait.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2s, file_digest
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np

from unet3d.data.case import Case, run_on_cases
from unet3d.data.formats.numpy_file import save_array
from unet3d.data.formats.volumes import list_files, read_header
from unet3d.data.preprocessing.channels import (
    compute_resampled_shape,
    find_orientation,
    get_spacing,
)
from unet3d.data.preprocessing.pipeline import PREPROCESSING_VERSION, Preprocessing
from unet3d.data.preprocessing.statistics import Statistics, to_tuples
from unet3d.errors import UsageError
from unet3d.files import add_path_to_errors, atomic_write, create_folder, lock_file, read_json
from unet3d.text import MIB, format_bytes
from unet3d.types import IGNORE_LABEL

T = TypeVar("T")

POINTS_PER_CLASS = 2000  # voxels of each class that are stored as centers for sampling patches
CROPPED = 8
"""How many times smaller than its estimate a case may be once it is cropped to its foreground."""

ARRAYS = ("image", "label", "foreground_points")  # the arrays of a cached volume
VALUES = "values.json"

PARSING = Lock()
"""Held while numpy parses a header with ast.literal_eval, which two threads at once break in Python
3.11 (https://github.com/python/cpython/issues/106905)."""

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
    hold is refused.
    """
    contents = digest_cases(cases, cache)
    folders = []
    for case, digests in zip(cases, contents, strict=True):
        parts = [preprocessing.to_dict(), PREPROCESSING_VERSION, list(ARRAYS), *digests]
        key = blake2s(json.dumps(parts).encode(), digest_size=8).hexdigest()
        folders.append(cache / f"{case.name}-{key}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        summaries = list(pool.map(lambda folder: find_entry(folder, read_summary), folders))
    found = zip(cases, folders, summaries, strict=True)
    missing = {case: folder for case, folder, summary in found if summary is None}
    for folder in missing.values():
        if folder.exists():
            log.warning("%s is damaged, preprocessing the case again", folder)
    if missing:

        def estimate(case: Case) -> PreprocessingCost:
            cost = estimate_preprocessing_cost(case.images, preprocessing)
            if ram is not None and cost.ram > CROPPED * ram:  # even if it is cropped
                raise UsageError(
                    f"{case.images[0]} takes up to {format_bytes(cost.ram)} of RAM to preprocess, "
                    f"{format_bytes(ram)} are available: correct the voxel spacing in its header, "
                    "or set a larger data.spacing_mm"
                )
            return cost

        def fill(case: Case) -> None:
            fill_entry(missing[case], read_summary, lambda: preprocess_case(case, preprocessing))

        costs = run_on_cases(estimate, [*missing])
        largest, disk = max(cost.ram for cost in costs), sum(cost.disk for cost in costs)
        threads = count_parallel_jobs(largest, ram)
        log.info(
            f"preprocessing {len(missing)} cases into {cache}: {format_bytes(disk)} of disk space, "
            f"at most {format_bytes(threads * largest)} of RAM for {threads} at a time"
        )
        run_on_cases(fill, [*missing], threads=threads)
    return [
        CachedVolume(case, folder, summary or read_summary(folder), digest)
        for case, folder, summary, digest in zip(cases, folders, summaries, contents, strict=True)
    ]


class PreprocessingCost(NamedTuple):
    """Bytes that preprocessing a case needs."""

    ram: int
    disk: int


def estimate_preprocessing_cost(
    files: Sequence[Path], preprocessing: Preprocessing
) -> PreprocessingCost:
    """Return an upper bound from the headers; how much is cropped is not known yet."""
    headers = [read_header(file) for file in files]
    channels = sum(header.num_channels for header in headers)
    axes, _ = find_orientation(headers[0].affine, preprocessing.orientation)
    old_mm, size = get_spacing(headers[0].affine, axes), headers[0].shape
    shape = compute_resampled_shape(
        [size[a] for a in axes], old_mm, preprocessing.spacing_mm or old_mm
    )
    old, new = prod(size[:3]), prod(shape)
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


def read_summary(folder: Path) -> VolumeSummary:
    """Read what a folder of the cache says of its case."""
    statistics = read_values(folder)["statistics"]
    _, label, points = (map_array(folder, name) for name in ARRAYS)
    return VolumeSummary(
        shape=label.shape,
        classes=frozenset(np.unique(points[:, 0]).tolist()),
        statistics=Statistics(**{key: to_tuples(value) for key, value in statistics.items()}),
    )


def preprocess_case(
    case: Case, preprocessing: Preprocessing
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and values of a case for the cache."""
    scan = preprocessing.preprocess_scan(case.images)
    label = preprocessing.preprocess_label(case.label, scan)
    arrays = (scan.image, label, sample_foreground_points(label))
    return dict(zip(ARRAYS, arrays, strict=True)), {"statistics": asdict(scan.statistics)}


def sample_foreground_points(label: np.ndarray) -> np.ndarray:
    """Return (N, 4), int32: some voxels of each class of a label (D, H, W)."""
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


def find_entry(folder: Path, read: Callable[[Path], T]) -> T | None:
    """Return what `read` makes of a folder; None if it is missing or damaged."""
    try:
        return read(folder)
    except (OSError, ValueError, KeyError):
        return None


def fill_entry(
    folder: Path,
    read: Callable[[Path], object],
    make: Callable[[], tuple[Mapping[str, np.ndarray], Mapping[str, Any]]],
) -> None:
    """Write the arrays and values that `make` returns, unless `read` finds an entry in the folder.

    Other threads, ranks and runs that want the same folder wait.
    """
    with lock_file(folder.with_name(f".{folder.name}.lock")):
        if find_entry(folder, read) is None:  # else another process has made it
            arrays, values = make()
            shutil.rmtree(folder, ignore_errors=True)
            with create_folder(folder) as draft:
                write_entry(draft, arrays, values)


def write_entry(folder: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
    """Write arrays and values, which then survive a power failure."""
    for key, array in arrays.items():
        save_array(folder / f"{key}.npy", array)
    with add_path_to_errors(folder / VALUES):
        (folder / VALUES).write_text(json.dumps({"values": values}), "utf-8")


def read_values(folder: Path) -> dict[str, Any]:
    """Return the values that `write_entry` has written."""
    content = (folder / VALUES).read_text("utf-8")
    return json.loads(content.partition("\n")[0])["values"]  # older entries have a line more


def map_array(folder: Path, name: str) -> np.ndarray:
    """Map an array that `write_entry` has written."""
    file = folder / f"{name}.npy"
    try:
        with PARSING:
            return np.lib.format.open_memmap(file, "r")
    except (FileNotFoundError, ValueError) as error:  # its header, or its size
        raise ValueError(f"{file} cannot be read ({error}): restart the run to make it") from error


def digest_cases(cases: Sequence[Case], folder: Path) -> list[tuple[str, ...]]:
    """Return a digest of each volume of each case; all are tried before a problem is raised.

    Digests are remembered in a folder with the size, times and inode of the files. The times are
    those of the contents and of the inode, which no program can set: a file that is replaced,
    rewritten or gets its old time back is read again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, list[str]] = {}
    with suppress(OSError, ValueError):  # where it is missing or damaged, all files are read
        known = read_json(folder / "contents.json")
    new: dict[str, list[str]] = {}

    def digest(volume: Path) -> str:
        path, parts = os.path.realpath(volume), list_files(volume)
        stats = [part.stat() for part in parts]
        state = [(s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for s in stats]
        version = _hash([*map(os.fsencode, parts), json.dumps(state).encode()])
        if path in known and known[path][0] == version:
            return known[path][1]
        new[path] = [version, digest_volume(volume)]
        return new[path][1]

    contents = run_on_cases(lambda case: tuple(map(digest, (*case.images, case.label))), cases)
    if new:
        with suppress(OSError), atomic_write(folder / "contents.json") as draft:
            draft.write_text(json.dumps(known | new), "utf-8")
    return contents


def digest_volume(volume: Path) -> str:
    """Return a digest of all files of a volume, whose names count where these are several."""
    parts = list_files(volume)
    if parts == [volume]:
        return digest_file(volume)
    names = [os.fsencode(part.relative_to(volume.parent)) for part in parts]
    return _hash([*names, *(digest_file(part).encode() for part in parts)])


def digest_file(file: Path) -> str:
    """Return a digest of the contents of a file."""
    with add_path_to_errors(file), file.open("rb") as stream:
        return file_digest(stream, "blake2b").hexdigest()


def _hash(parts: Sequence[bytes]) -> str:
    return blake2s(b"\0".join(parts)).hexdigest()
