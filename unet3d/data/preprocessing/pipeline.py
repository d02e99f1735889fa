"""Preprocess cases: read, reorient, crop, normalize and resample."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.case import Case
from unet3d.data.formats.labels import read_labels
from unet3d.data.formats.volume_format import Grid, iter_slabs
from unet3d.data.formats.volumes import read_volume
from unet3d.data.preprocessing.channels import Intensity, find_border_value, preprocess_channels
from unet3d.data.preprocessing.resampling import (
    FileGrid,
    choose_interpolation_orders,
    crop,
    get_spacing,
    reorient,
    resample_labels,
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
from unet3d.types import IGNORE_LABEL

PREPROCESSING_VERSION = 1
"""Part of every key of the cache: raise it when the same files and settings give other values."""

AUTO = "auto"
"""Background that is found for each channel of each case: the constant value of its border."""

Background = tuple[float | str, ...]
"""The value where nothing was scanned, or AUTO: one for all channels, or one per channel."""


@dataclass(frozen=True, kw_only=True)
class PreprocessedScan:
    """A preprocessed image and its position in its file."""

    image: np.ndarray  # (C, D, H, W), float32
    grid: FileGrid
    spacing_mm: tuple[float, float, float]  # after resampling
    file_spacing_mm: tuple[float, float, float]  # before resampling, in the same orientation
    affine: np.ndarray  # of the file
    percentiles: tuple[Percentiles, ...]  # of each channel before normalization

    @property
    def statistics(self) -> Statistics:
        """Return the statistics for a comparison with other scans."""
        sizes = zip(self.grid.box, self.file_spacing_mm, strict=True)
        d, h, w = ((stop - start) * mm for (start, stop), mm in sizes)
        return Statistics(
            spacing_mm=self.file_spacing_mm, extent_mm=(d, h, w), percentiles=self.percentiles
        )


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Preprocessing settings; stored in checkpoints, so that inference preprocesses alike.

    A channel is normalized to mean 0 and standard deviation 1: with `zscore` over the volume, with
    `zscore_nonzero` over its foreground, with `ct` by the dataset's foreground statistics after
    clipping to the percentiles 0.5 and 99.5; `none` leaves it as it is. With `zscore_nonzero` and
    `none` the background becomes 0, the value with which patches are padded; with the other two it
    is an ordinary value.
    """

    num_classes: int
    orientation: str = "RAS"
    spacing_mm: tuple[float, float, float] | None = None  # None: the file's
    background: Background = (0,)
    crop: str = "nonzero"  # to the foreground's box; or none
    normalize: tuple[str, ...] = ("zscore",)  # one for all channels, or one per channel
    intensities: tuple[Intensity, ...] | None = None  # one per channel; required by ct
    ignore_labels: tuple[int, ...] = ()  # their values in the files

    def __post_init__(self):
        if not 2 <= self.num_classes <= IGNORE_LABEL:
            raise UsageError(f"data.num_classes must be 2..{IGNORE_LABEL}, got {self.num_classes}")
        if any(0 <= label < self.num_classes for label in self.ignore_labels):
            raise UsageError(
                f"data.ignore_label must be outside of the classes 0..{self.num_classes - 1}, "
                f"got {list(self.ignore_labels)}"
            )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        """Build the settings from the result of `to_dict`."""
        values = {k: to_tuples(v) for k, v in settings.items()}
        if "ignore_label" in values:  # of a checkpoint from before there could be several
            label = values.pop("ignore_label")
            values["ignore_labels"] = () if label is None else (label,)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain values."""
        return {k: to_lists(v) for k, v in asdict(self).items()}

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
            background=find_background(channels, self.background),
            crop_to_foreground=self.crop == "nonzero",
            normalize=self.normalize * (len(channels) if len(self.normalize) == 1 else 1),
            intensities=self.intensities,
        )
        cropped = crop(reorient(channels, grid.axes, grid.flips), grid)
        old_mm = get_spacing(affine, grid.axes)
        d, h, w = (o * n / s for o, n, s in zip(old_mm, cropped.shape[1:], grid.shape, strict=True))
        return PreprocessedScan(
            image=image,
            grid=grid,
            spacing_mm=(d, h, w),
            file_spacing_mm=old_mm,
            affine=affine,
            percentiles=tuple(measure_percentiles(channel) for channel in cropped),
        )

    def preprocess_label(self, file: Path, scan: PreprocessedScan) -> np.ndarray:
        """Preprocess a label to (D, H, W), uint8, on the scan's grid, with IGNORE_LABEL."""
        grid = Grid(shape=scan.grid.file_shape, affine=scan.affine)
        values = self._to_classes(read_label(file, grid), file)
        values = crop(reorient(values, scan.grid.axes, scan.grid.flips), scan.grid)
        orders = choose_interpolation_orders(scan.file_spacing_mm, scan.spacing_mm, 1)
        return np.ascontiguousarray(resample_labels(values, scan.grid.shape, orders))

    def _to_classes(self, values: np.ndarray, file: Path) -> np.ndarray:
        allowed = set(range(self.num_classes)) | {*self.ignore_labels}
        unknown = [str(v) for v in np.unique(values).tolist() if v not in allowed]
        if unknown:
            ignored = "".join(f" or {label} (ignored)" for label in self.ignore_labels)
            raise UsageError(
                f"{file}: labels must be 0..{self.num_classes - 1}{ignored}, "
                f"found {join_first(unknown)}"
            )
        is_ignored = np.isin(values, self.ignore_labels)
        label = np.where(is_ignored, 0, values).astype(np.uint8)
        label[is_ignored] = IGNORE_LABEL
        return label


def choose_background(channels: Sequence[str]) -> Background:
    """Return AUTO for every channel except CT, in which air is an ordinary value."""
    return tuple(0 if name.upper() == "CT" else AUTO for name in channels)


def repeat_per_channel(background: Background, channels: int) -> Background:
    """Return one value per channel."""
    return background if len(background) > 1 else background * channels


def find_background(channels: np.ndarray, background: Background) -> list[float]:
    """Return the value of each channel (C, D, H, W); AUTO gives 0 if the border is not constant."""
    values = repeat_per_channel(background, len(channels))
    if len(values) != len(channels):
        raise UsageError(
            f"data.background must be one value or one for each of the {len(channels)} channels, "
            f"got {list(background)}"
        )
    return [
        (find_border_value(channel) or 0.0) if value == AUTO else float(value)
        for channel, value in zip(channels, values, strict=True)
    ]


def check_channels(source: str, count: int, names: Sequence[str]) -> None:
    """Refuse another number of channels than a network takes; `source` names what has them."""
    if count != len(names):
        raise UsageError(
            f"{source} has {count} channels, but the network takes {len(names)}: {', '.join(names)}"
        )


def read_channels(files: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Return the channels (C, D, H, W) in the files' grid, and the first file's affine."""
    parts, affine = [], np.eye(4)
    for index, file in enumerate(files):
        channels, file_affine = read_volume(file)
        if any(map(count_nonfinite, channels)):
            raise UsageError(f"{file} holds NaN or infinite values")
        if index and channels.shape[1:] != parts[0].shape[1:]:
            raise UsageError(
                f"{file} has shape {list(channels.shape[1:])}, but {files[0]} "
                f"{list(parts[0].shape[1:])}: the channels of a case must have the same shape"
            )
        affine = affine if index else file_affine
        parts.append(channels)
    return parts[0] if len(parts) == 1 else _concatenate(parts), affine


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate channels in the memory order of files, which is the fastest to copy."""
    c, (d, h, w) = sum(len(part) for part in parts), parts[0].shape[1:]
    channels = np.empty((c, w, h, d), np.result_type(*parts)).transpose(0, 3, 2, 1)
    return np.concatenate(parts, out=channels)


def count_nonfinite(channel: np.ndarray) -> int:
    """Return how many voxels are NaN or infinite in float32."""
    return sum(int(np.count_nonzero(~np.isfinite(values))) for values in iter_slabs(channel))


def read_label(file: Path, grid: Grid) -> np.ndarray:
    """Return labels (D, H, W) in the grid of their image, whose shape they must have."""
    labels, _ = read_labels(file, grid)
    if labels.shape != grid.shape:
        raise UsageError(
            f"{file} has shape {list(labels.shape)}, but its image {list(grid.shape)}: they must "
            "be equal"
        )
    return labels


def preprocess_case(
    case: Case, preprocessing: Preprocessing
) -> tuple[PreprocessedScan, np.ndarray]:
    """Return the preprocessed image of a case and its label (D, H, W), uint8."""
    scan = preprocessing.preprocess_scan(case.images)
    return scan, preprocessing.preprocess_label(case.label, scan)
