"""Preprocess cases: read, reorient, crop, normalize and resample."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volume_format import Grid, iter_slabs
from unet3d.data.formats.volumes import read_labels, read_volume
from unet3d.data.preprocessing.channels import (
    AUTO,
    FileGrid,
    Intensity,
    choose_interpolation_orders,
    get_spacing,
    preprocess_channels,
    resample_labels,
    spread_annotations,
)
from unet3d.data.preprocessing.statistics import (
    Percentiles,
    Statistics,
    measure_percentiles,
    to_lists,
    to_tuples,
)
from unet3d.errors import UsageError
from unet3d.text import join_first
from unet3d.types import FloatTriple, get_ignore_label, get_label_dtype

PREPROCESSING_VERSION = 8
"""Part of every key of the cache: raise it when the same files and settings give other values."""

MIN_RESAMPLED = 0.5
"""Fraction of the volume of a class below which resampling erases it."""

Background = tuple[float | str, ...]
"""The value where nothing was scanned, or AUTO: one for all channels, or one per channel."""


@dataclass(frozen=True, kw_only=True)
class PreprocessedScan:
    """A preprocessed image and its position in its file."""

    image: Any  # (C, D, H, W), float32: an array, or a RegionImage
    grid: FileGrid
    spacing_mm: FloatTriple  # after resampling
    affine: np.ndarray  # of the file
    statistics: Statistics  # before normalization, for a comparison with other scans


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Preprocessing settings; stored in checkpoints, so that inference preprocesses alike.

    A channel is normalized to mean 0 and standard deviation 1: with `zscore` over the volume, with
    `zscore_nonzero` over its foreground, with `ct` by the dataset's foreground statistics after
    clipping to the percentiles 0.5 and 99.5. `rescale_to_0_1` scales to the volume's minimum and
    maximum, `rgb_to_0_1` divides by 255, and `none` leaves a channel as it is. With
    `zscore_nonzero` and `none` the background becomes 0, the value with which patches are padded;
    with the others it is an ordinary value.
    """

    num_classes: int
    orientation: str = "RAS"
    spacing_mm: FloatTriple | None = None  # None: the file's
    background: Background = (0,)
    crop: str = "nonzero"  # to the foreground's box; or none
    normalize: tuple[str, ...] = ("zscore",)  # one for all channels, or one per channel
    intensities: tuple[Intensity, ...] | None = None  # one per channel; required by ct
    ignore_labels: tuple[int, ...] = ()  # their values in the files
    label_values: tuple[int, ...] | None = None  # of the classes in files; None: 0, 1, 2, ...

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        return cls(**{k: to_tuples(v) for k, v in settings.items()})

    def to_dict(self) -> dict[str, Any]:
        values = {k: to_lists(v) for k, v in asdict(self).items()}
        if self.label_values is None:  # earlier caches and checkpoints do not have it
            del values["label_values"]
        return values

    def preprocess_scan(self, files: Sequence[Path], names: Sequence[str] = ()) -> PreprocessedScan:
        """Preprocess the channels of a case, from one file or one file each.

        `names` are those that a network takes; (): the headers were checked.
        """
        channels, affine = read_channels(files)
        if names:
            check_channels(", ".join(file.name for file in files), len(channels), names)
        return self.preprocess_channels(channels, affine)

    def preprocess_channels(self, channels: np.ndarray, affine: np.ndarray) -> PreprocessedScan:
        """Preprocess channels (C, D, H, W) in the array axes of their file."""
        image, grid = preprocess_channels(
            channels,
            affine,
            orientation=self.orientation,
            spacing_mm=self.spacing_mm,
            background=self.background,
            crop_to_foreground=self.crop == "nonzero",
            normalize=self.list_methods(len(channels)),
            intensities=self.intensities,
        )
        percentiles = tuple(map(measure_percentiles, grid.crop(channels)))
        return describe_scan(image, grid, affine, percentiles)

    def list_methods(self, channels: int) -> tuple[str, ...]:
        """Return how each channel is normalized, given their number."""
        return self.normalize * (channels if len(self.normalize) == 1 else 1)

    def preprocess_label(
        self, file: Path, scan: PreprocessedScan
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Preprocess a label to classes (D, H, W) on the scan's grid.

        Also return what of the foreground is lost: the share that the crop of the scan has cut off,
        and the classes of which resampling has left less than half of the volume.
        """
        values, _ = read_labels(file, Grid(shape=scan.grid.file_shape, affine=scan.affine))
        present = np.unique(values)
        known = self.label_values or range(self.num_classes)
        for problem, _ in check_label_values(present, known, self.ignore_labels):
            raise UsageError(f"{file} {problem}")
        classes, shape = self.to_classes(values), scan.grid.shape
        label = scan.grid.crop(classes)
        inside, total = map(count_labels, (label, classes))
        if self.ignore_labels:
            label = spread_annotations(label, shape, get_ignore_label(label))
        old_mm = scan.statistics.spacing_mm
        orders = choose_interpolation_orders(old_mm, self.spacing_mm or old_mm, 1)  # as the image's
        resampled = np.ascontiguousarray(resample_labels(label, shape, orders))
        kept = inside if resampled.shape == label.shape else count_labels(resampled)
        erased = kept / resampled.size < MIN_RESAMPLED * inside / label.size
        return resampled, {
            "cropped_foreground": 1 - inside.sum() / total.sum() if total.any() else 0.0,
            "erased_classes": np.flatnonzero(erased).tolist(),
        }

    def to_classes(self, values: np.ndarray) -> np.ndarray:
        """Return the class of each value of a label file, or the label of voxels to skip."""
        dtype = get_label_dtype(self.num_classes)
        if self.label_values is None:
            classes = values.astype(dtype)
        else:
            table = np.zeros(max(self.label_values) + 1, dtype)
            table[list(self.label_values)] = range(self.num_classes)
            classes = table[values.clip(0, len(table) - 1)]
        classes[np.isin(values, self.ignore_labels)] = get_ignore_label(classes)
        return classes


def count_labels(label: np.ndarray) -> np.ndarray:
    """Return the number of voxels of each class, with 0 for the background and ignored ones."""
    ignored = get_ignore_label(label)
    slices = (np.bincount(part.ravel(), minlength=ignored + 1) for part in label)
    counts = sum(slices, np.zeros(ignored + 1, np.int64))
    counts[[0, ignored]] = 0
    return counts


def describe_scan(
    image: Any, grid: FileGrid, affine: np.ndarray, percentiles: tuple[Percentiles, ...]
) -> PreprocessedScan:
    """Return a preprocessed image with what its grid says of it."""
    old_mm = get_spacing(affine, grid.axes)
    extent_mm = np.multiply(old_mm, [stop - start for start, stop in grid.box])
    return PreprocessedScan(
        image=image,
        grid=grid,
        spacing_mm=to_tuples((extent_mm / grid.shape).tolist()),
        affine=affine,
        statistics=Statistics(
            spacing_mm=old_mm, extent_mm=to_tuples(extent_mm.tolist()), percentiles=percentiles
        ),
    )


def choose_background(channels: Sequence[str]) -> Background:
    """Return AUTO for every channel except CT, in which air is an ordinary value."""
    return tuple(0 if name.upper() == "CT" else AUTO for name in channels)


def check_channels(source: str, count: int, names: Sequence[str]) -> None:
    """Refuse another number of channels than a network takes; `source` names what has them."""
    if count != len(names):
        raise UsageError(
            f"{source} has {count} channels, but the network takes {len(names)}: {', '.join(names)}"
        )


def read_channels(files: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Return the channels (C, D, H, W) in the files' grid, and the first file's affine."""
    parts, affines = [], []
    for file in files:
        channels, affine = read_volume(file)
        if count_nonfinite(channels):
            raise UsageError(f"{file} holds NaN or infinite values")
        parts.append(channels)
        affines.append(affine)
    return parts[0] if len(parts) == 1 else np.concatenate(parts), affines[0]


def count_nonfinite(channels: np.ndarray) -> int:
    """Return how many voxels of (C, D, H, W) are NaN or infinite in float32."""
    return sum(int(np.count_nonzero(~np.isfinite(values))) for values in iter_slabs(channels))


def check_label_values(
    present: np.ndarray, known: Sequence[int], ignore_labels: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the values of a label file, and how to fix it."""
    finite = present[np.isfinite(present)]
    is_integer = finite == np.round(finite)
    unknown = sorted({int(v) for v in finite[is_integer]} - {*known, *ignore_labels})
    if len(finite) < len(present):
        yield "holds NaN or infinity", "replace them with labels"
    if not is_integer.all():
        fractional = join_first(list(map(str, finite[~is_integer])))  # 0.9999999 is not 1
        advice = "annotate again, or resample without interpolating between labels"
        yield f"holds {fractional}: labels must be integers", advice
    if unknown:
        ignored = "".join(f" or {label} (ignored)" for label in ignore_labels)
        found = join_first(list(map(str, unknown)))
        valid = f"0..{known[-1]}" if isinstance(known, range) else join_first([*map(str, known)])
        message = f"holds {found}: labels must be {valid}{ignored}"
        yield message, "correct the classes, data.ignore_label or data.label_values"
