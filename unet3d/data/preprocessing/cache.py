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
from dataclasses import asdict, dataclass, replace
from hashlib import blake2s, file_digest
from importlib import import_module
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np

from unet3d.control_groups import count_usable_cores
from unet3d.data.case import Case, run_on_cases
from unet3d.data.formats.hdf5 import split_array
from unet3d.data.formats.volumes import list_files, read_header
from unet3d.data.preprocessing.channels import (
    compute_resampled_shape,
    find_orientation,
    get_spacing,
)
from unet3d.data.preprocessing.pipeline import PREPROCESSING_VERSION, Preprocessing
from unet3d.data.preprocessing.statistics import Statistics, to_tuples
from unet3d.errors import UsageError, explain_missing_packages
from unet3d.files import (
    add_path_to_errors,
    atomic_write,
    create_folder,
    lock_file,
    read_json,
    remove_temporary_files,
)
from unet3d.text import MIB, format_bytes
from unet3d.types import get_ignore_label

T = TypeVar("T")

Entry = tuple[Mapping[str, np.ndarray], Mapping[str, Any]]
"""Arrays and values of a folder of the cache, by name."""

POINTS_PER_CLASS = 2000  # voxels of each class that are stored as centers for sampling patches
MAX_CROP_FACTOR = 8
"""How many times smaller than its estimate a case may be once it is cropped to its foreground."""

VALUES = "values.json"

COMPRESSED = ".b2nd"
CHUNK_AND_BLOCK = 64, 32
"""Voxels along each axis of what is stored together, and of what is read at least."""

HEADER_PARSE_LOCK = Lock()
"""Held while numpy parses a header with ast.literal_eval, which two threads at once break in Python
3.11 (https://github.com/python/cpython/issues/106905)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedVolume:
    """A preprocessed case; its arrays are memory-mapped."""

    case: Case
    folder: Path
    shape: tuple[int, ...]  # (D, H, W)
    classes: frozenset[int]  # foreground classes that occur
    statistics: Statistics  # before normalization
    contents: tuple[str, ...] = ()  # digests of the files that it was made of
    background_label: int = 0  # what a sample has as label where the case has 0
    has_ignored: bool = False  # whether some voxels are ignored, and others are not
    is_constant: bool = False  # whether the image has one value everywhere
    cropped_foreground: float = 0.0  # share of it that lies where nothing was scanned
    erased_classes: tuple[int, ...] = ()  # of which resampling has left less than half

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def image(self) -> np.ndarray:
        """Map the image (C, D, H, W), float32."""
        return map_array(self.folder, "image")

    @property
    def label(self) -> np.ndarray:
        """Map the classes (D, H, W)."""
        return map_array(self.folder, "label")

    @property
    def foreground_points(self) -> np.ndarray:
        """Map (N, 4): the class and d, h, w of sampled foreground voxels, sorted by class.

        Where some voxels are ignored, class 0 stands for those of any class.
        """
        return map_array(self.folder, "foreground_points")


def preprocess_all(
    cases: Sequence[Case],
    preprocessing: Preprocessing,
    cache: Path,
    cache_format: str = "npy",
    *,
    ram: int | None = None,
) -> list[CachedVolume]:
    """Return every case, from the cache if it is there; as blosc2, arrays are compressed.

    All cases are tried before the problems of any are raised. One case per core is preprocessed at
    a time, or fewer if half of the available `ram` does not hold them. A case that `ram` does not
    hold is refused.
    """
    contents = digest_cases(cases, cache)
    settings: dict[str, Any] = preprocessing.to_dict()
    if cache_format != "npy":  # caches that have it do not say so
        settings["format"] = cache_format
        with explain_missing_packages(f"data.cache_format={cache_format}", cache_format):
            import_module(cache_format)
    folders = {
        case: cache / f"{case.name}-{make_key(settings, *digests)}"
        for case, digests in contents.items()
    }

    def estimate(case: Case) -> PreprocessingCost:
        cost = estimate_preprocessing_cost(case.images, preprocessing)
        if ram is not None and cost.ram > MAX_CROP_FACTOR * ram:  # even if it is cropped
            raise UsageError(
                f"{case.images[0]} takes up to {format_bytes(cost.ram)} of RAM to preprocess, "
                f"{format_bytes(ram)} are available: correct the voxel spacing in its header, "
                "or set a larger data.spacing_mm"
            )
        return cost

    def choose_threads(missing: Sequence[Case]) -> int:
        costs = run_on_cases(estimate, missing)
        largest, disk = max(cost.ram for cost in costs), sum(cost.disk for cost in costs)
        threads = count_parallel_jobs(largest, ram)
        log.info(
            f"preprocessing {len(missing)} cases into {cache}: up to {format_bytes(disk)} of disk, "
            f"at most {format_bytes(threads * largest)} of RAM for {threads} at a time"
        )
        return threads

    volumes = load_or_make(
        folders,
        load=load_volume,
        make=lambda case: preprocess_case(case, preprocessing),
        compress=cache_format == "blosc2",
        choose_threads=choose_threads,
    )
    return [replace(volume, contents=contents[volume.case]) for volume in volumes]


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
    cores = count_usable_cores()
    return cores if ram is None else max(1, min(cores, ram // 2 // cost))


def preprocess_case(case: Case, preprocessing: Preprocessing) -> Entry:
    """Return the arrays and values of a case for the cache."""
    scan = preprocessing.preprocess_scan(case.images)
    label, losses = preprocessing.preprocess_label(case.label, scan)
    points = sample_foreground_points(label)
    arrays = {"image": scan.image, "label": label, "foreground_points": points}
    is_constant = bool(scan.image.min() == scan.image.max())
    return arrays, {"statistics": asdict(scan.statistics), "is_constant": is_constant, **losses}


def load_volume(case: Case, folder: Path) -> CachedVolume:
    """Return a case from the folder in which it was preprocessed."""
    values = read_json(folder / VALUES)
    statistics = values["statistics"]
    _, label, points = (map_array(folder, n) for n in ("image", "label", "foreground_points"))
    present = frozenset(np.unique(points[:, 0]).tolist())
    return CachedVolume(
        case,
        folder,
        shape=label.shape,
        classes=present - {0},
        statistics=Statistics(**{key: to_tuples(value) for key, value in statistics.items()}),
        has_ignored=0 in present,
        is_constant=values.get("is_constant", False),
        cropped_foreground=values.get("cropped_foreground", 0.0),
        erased_classes=tuple(values.get("erased_classes", ())),
    )


def sample_foreground_points(label: np.ndarray) -> np.ndarray:
    """Return the `foreground_points`, int32, of a label (D, H, W)."""
    from scipy.ndimage import find_objects

    rng = np.random.default_rng(0)
    rows = [np.empty((0, 4), np.int32)]
    boxes: list[Any] = find_objects(label)  # of each class from 1, or None
    ignored = get_ignore_label(label)
    has_ignored = len(boxes) == ignored  # the last box is that of the largest label
    for c, box in enumerate([(slice(None),) * 3 if has_ignored else None, *boxes[: ignored - 1]]):
        if box is None:
            continue
        points = np.argwhere(label[box] == c if c else label != ignored)
        points += [side.start or 0 for side in box]
        if len(points) > POINTS_PER_CLASS:
            points = points[np.sort(rng.choice(len(points), POINTS_PER_CLASS, replace=False))]
        rows.append(np.insert(points, 0, c, axis=1).astype(np.int32))
    return np.concatenate(rows)


def make_key(*parts: Any) -> str:
    """Return a name for what was made from settings and files, which `parts` describe."""
    text = json.dumps([PREPROCESSING_VERSION, *parts])
    return blake2s(text.encode(), digest_size=8).hexdigest()


def load_or_make(
    folders: Mapping[Case, Path],
    *,
    load: Callable[[Case, Path], T],
    make: Callable[[Case], Entry],
    choose_threads: Callable[[Sequence[Case]], int],
    compress: bool = False,
) -> list[T]:
    """Load every case from its folder; those that are missing or damaged are made first.

    Other threads, ranks and runs that want the same folder wait.
    """

    def try_load(case: Case) -> T | None:
        try:
            return load(case, folders[case])
        except (OSError, ValueError, KeyError):
            return None

    def fill(case: Case) -> None:
        folder = folders[case]
        with lock_file(folder.with_name(f".{folder.name}.lock")) as is_locked:
            if is_locked:
                remove_temporary_files(folder)
            if try_load(case) is not None:  # another process has made it
                return
            arrays, values = make(case)
            shutil.rmtree(folder, ignore_errors=True)
            with create_folder(folder) as draft:
                for name, array in arrays.items():
                    if compress and array.ndim > 2:  # not the points, which are few
                        write_compressed(draft / f"{name}{COMPRESSED}", array)
                    else:
                        np.save(draft / f"{name}.npy", array)
                (draft / VALUES).write_text(json.dumps(values), "utf-8")

    with ThreadPoolExecutor(count_usable_cores()) as pool:
        loaded = dict(zip(folders, pool.map(try_load, folders), strict=True))
    missing = [case for case, result in loaded.items() if result is None]
    for case in missing:
        if folders[case].exists():
            log.warning("%s is damaged, preprocessing the case again", folders[case])
    if missing:
        run_on_cases(fill, missing, threads=choose_threads(missing), doing="cached")
    return [
        load(case, folders[case]) if result is None else result for case, result in loaded.items()
    ]


def write_compressed(file: Path, array: np.ndarray) -> None:
    """Write (..., D, H, W) without loss, in parts that a patch reads alone."""
    import blosc2

    chunks, blocks = (
        (1,) * (array.ndim - 3) + tuple(min(side, size) for size in array.shape[-3:])
        for side in CHUNK_AND_BLOCK
    )
    values: Any = np.ascontiguousarray(array)
    blosc2.asarray(
        values,
        urlpath=str(file),
        chunks=chunks,
        blocks=blocks,
        cparams={"nthreads": 1},
    )


def map_array(folder: Path, name: str) -> Any:
    """Map an array of an entry; a compressed one reads what it is sliced to."""
    file = folder / f"{name}{COMPRESSED}"
    try:
        if file.exists():
            import blosc2

            return blosc2.open(str(file), mode="r", dparams={"nthreads": 1})
        file = folder / f"{name}.npy"
        with HEADER_PARSE_LOCK:
            return np.lib.format.open_memmap(file, "r")
    except (FileNotFoundError, ValueError, RuntimeError) as error:  # its header, or its size
        raise ValueError(f"{file} cannot be read ({error}): restart the run to make it") from error


def digest_cases(cases: Sequence[Case], folder: Path) -> dict[Case, tuple[str, ...]]:
    """Return a digest of each volume of each case; all are tried before a problem is raised.

    Digests are remembered in a folder with the size, times and inode of the files. The times are
    those of the contents and of the inode, which no program can set: a file that is replaced,
    rewritten or gets its old time back is read again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):  # where it is missing or damaged, all files are read
        known = read_json(folder / "contents.json")
    new: dict[str, str] = {}

    def digest(volume: Path) -> str:
        version = get_version(volume)
        if version not in known:
            new[version] = digest_volume(volume)
        return known.get(version) or new[version]

    contents = run_on_cases(
        lambda case: tuple(map(digest, (*case.images, case.label))), cases, doing="comparing files"
    )
    if new:
        with suppress(OSError), atomic_write(folder / "contents.json") as draft:
            draft.write_text(json.dumps(known | new), "utf-8")
    return dict(zip(cases, contents, strict=True))


def get_version(volume: Path) -> str:
    """Return what changes when a file of a volume does, without reading it."""
    parts = list_files(volume)
    stats = [part.stat() for part in parts]
    state = [(s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for s in stats]
    return make_key(os.path.realpath(volume), *map(str, parts), state)


def digest_volume(volume: Path) -> str:
    """Return a digest of all files of a volume, whose names count where these are several.

    So does the name of an array within a file.
    """
    parts, (file, array) = list_files(volume), split_array(volume)
    if parts == [volume]:
        return digest_file(volume)
    if parts == [file]:
        return blake2s(f"{digest_file(file)} {array}".encode()).hexdigest()
    names = [os.fsencode(os.path.relpath(part, file.parent)) for part in parts]
    digests = [digest_file(part).encode() for part in parts]
    return blake2s(b"\0".join([*names, *digests, *([array.encode()] if array else [])])).hexdigest()


def digest_file(file: Path) -> str:
    """Return a digest of the contents of a file."""
    with add_path_to_errors(file), file.open("rb") as stream:
        return file_digest(stream, "blake2b").hexdigest()
