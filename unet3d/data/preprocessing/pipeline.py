"""From files to arrays that a network can read, and where those lie in their files."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.case import Case
from unet3d.data.nifti.reader import read_volume
from unet3d.data.preprocessing.background import Background, check_background, find_background
from unet3d.data.preprocessing.resampling import (
    choose_interpolation_orders,
    compute_resampled_shape,
    crop,
    get_full_box,
    nonzero_box,
    orientation,
    reorient,
    resample,
    resample_labels,
    spacing,
)
from unet3d.data.preprocessing.statistics import Levels, Statistics, measure
from unet3d.errors import UsageError
from unet3d.types import IGNORE_LABEL, FileGrid

NORMALIZATIONS = ("zscore", "zscore_nonzero", "ct", "none")

ORIENTATIONS = [sorted(a + b + c) for a in "LR" for b in "AP" for c in "IS"]

Intensity = tuple[float, float, float, float]
"""Mean, deviation and the percentiles 0.5 and 99.5 of a channel's foreground over the data set."""


@dataclass(frozen=True, kw_only=True)
class PreprocessedScan:
    """A prepared image and its place in the file."""

    image: np.ndarray  # (C, D, H, W), float32
    grid: FileGrid
    spacing_mm: tuple[float, float, float]  # of the prepared image
    file_spacing_mm: tuple[float, float, float]  # before resampling, in the same orientation
    affine: np.ndarray  # of the file
    levels: tuple[Levels, ...]  # of each channel before normalization

    @property
    def statistics(self) -> Statistics:
        """What tells whether it is like other scans."""
        sizes = zip(self.grid.box, self.file_spacing_mm, strict=True)
        d, h, w = ((stop - start) * mm for (start, stop), mm in sizes)
        return Statistics(spacing_mm=self.file_spacing_mm, extent_mm=(d, h, w), levels=self.levels)


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How a volume is made ready; kept in checkpoints, so that prediction does the same.

    A channel is normalised to mean 0 and deviation 1: `zscore` of the volume, `zscore_nonzero` of
    its voxels that are not background, `ct` of the data set's foreground after clipping to its
    percentiles 0.5 and 99.5; or `none`. With `zscore_nonzero` and `none` the background becomes 0,
    as what patches have outside of a volume; with the other two it is a value like any other.
    """

    num_classes: int
    orientation: str = "RAS"
    spacing_mm: tuple[float, float, float] | None = None  # None: as it is in the file
    background: Background = (0,)  # where nothing was scanned: one for all channels, or each
    crop: str = "nonzero"  # to the box of voxels that are not background; or none
    normalize: tuple[str, ...] = ("zscore",)  # one for all channels, or one for each
    intensities: tuple[Intensity, ...] | None = None  # one for each channel; what ct needs
    ignore_label: int | None = None  # as the files call it

    def __post_init__(self):
        strange = [n for n in self.normalize if n not in NORMALIZATIONS]
        if strange or not self.normalize:
            raise UsageError(
                f"data.normalize must be auto or of {', '.join(NORMALIZATIONS)}, one for all "
                f"channels or a list with one for each, got {list(self.normalize)}"
            )
        check_background(self.background)
        if self.crop not in ("nonzero", "none"):
            raise UsageError(f"data.crop must be nonzero or none, got {self.crop!r}")
        if sorted(self.orientation) not in ORIENTATIONS:
            raise UsageError(
                "data.orientation must name one of L R, one of P A and one of I S, as RAS does, "
                f"got {self.orientation!r}"
            )
        if not 2 <= self.num_classes <= IGNORE_LABEL:
            raise UsageError(f"data.num_classes must be 2..{IGNORE_LABEL}, got {self.num_classes}")
        if self.ignore_label is not None and 0 <= self.ignore_label < self.num_classes:
            raise UsageError(
                f"data.ignore_label must lie outside the classes 0..{self.num_classes - 1}, "
                f"got {self.ignore_label}"
            )
        if self.spacing_mm is not None and (
            len(self.spacing_mm) != 3 or not min(self.spacing_mm) > 0
        ):
            raise UsageError(
                "data.spacing_mm must be three numbers above 0, median or null, "
                f"got {list(self.spacing_mm)}"
            )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        """From what `settings` gave."""
        return cls(**{k: _tuples(v) for k, v in settings.items()})

    def to_dict(self) -> dict[str, Any]:
        """All of the above, as plain values.

        A background of 0 is left out, so that older checkpoints and prepared volumes still agree.
        """
        found = {k: _lists(v) for k, v in asdict(self).items()}
        if set(self.background) == {0}:
            del found["background"]
        return found

    def scan(self, files: Sequence[Path]) -> PreprocessedScan:
        """The channels of a case, from one file or one each."""
        channels, affine = read_channels(files)
        axes, flips = orientation(affine, self.orientation)
        file_shape = channels.shape[1:]
        channels = reorient(channels, axes, flips)
        background = find_background(channels, self.background)
        crops = self.crop == "nonzero"
        box = nonzero_box(channels, background) if crops else get_full_box(channels)
        size = [stop - start for start, stop in box]
        old_mm = spacing(affine, axes)
        new_mm = self.spacing_mm or old_mm
        shape = compute_resampled_shape(size, old_mm, new_mm)
        grid = FileGrid(file_shape=file_shape, axes=axes, flips=flips, box=box, shape=shape)
        levels = tuple(measure(crop(channel, grid)) for channel in channels)
        image = np.empty((len(channels), *shape), np.float32)
        for c in range(len(channels)):
            channel = crop(channels[c], grid).astype(np.float32)
            channel = self._normalized(channel, c, np.float32(background[c]))
            image[c] = resample(channel, shape, choose_interpolation_orders(old_mm, new_mm, 3))
        d, h, w = (o * n / s for o, n, s in zip(old_mm, size, shape, strict=True))
        return PreprocessedScan(
            image=image,
            grid=grid,
            spacing_mm=(d, h, w),
            file_spacing_mm=old_mm,
            affine=affine,
            levels=levels,
        )

    def label(self, file: Path, scan: PreprocessedScan) -> np.ndarray:
        """(D, H, W), uint8, on the scan's grid; voxels to ignore are IGNORE."""
        values = self._checked(read_label(file, scan.grid.file_shape), file)
        values = crop(reorient(values, scan.grid.axes, scan.grid.flips), scan.grid)
        orders = choose_interpolation_orders(scan.file_spacing_mm, scan.spacing_mm, 1)
        return np.ascontiguousarray(resample_labels(values, scan.grid.shape, orders))

    def _checked(self, values: np.ndarray, file: Path) -> np.ndarray:
        allowed = set(range(self.num_classes)) | {self.ignore_label}
        strange = [float(v) for v in np.unique(values) if v not in allowed]
        if strange:
            raise UsageError(
                f"{file}: labels must be 0..{self.num_classes - 1}"
                + (f" or {self.ignore_label} (ignored)" if self.ignore_label is not None else "")
                + f", it holds {', '.join(f'{v:g}' for v in strange[:5])}"
                + ("" if len(strange) <= 5 else f" and {len(strange) - 5} more")
            )
        ignored = values == self.ignore_label
        label = np.where(ignored, 0, values).astype(np.uint8)
        label[ignored] = IGNORE_LABEL
        return label

    def _normalized(self, channel: np.ndarray, number: int, background: np.float32) -> np.ndarray:
        """In place."""
        how = self.normalize[number if len(self.normalize) > 1 else 0]
        if how == "none":
            if background:
                channel[channel == background] = 0
            return channel
        if how == "ct":
            assert self.intensities is not None, "build gives them where a channel is ct"
            mean, deviation, low, high = self.intensities[number]
            np.clip(channel, low, high, out=channel)
            counted = ...
        else:
            counted = ...
            if how == "zscore_nonzero":
                counted = channel != background
                if not counted.any():
                    counted = ...
                elif background:
                    channel[~counted] = 0
            mean, deviation = channel[counted].mean(dtype=float), channel[counted].std(dtype=float)
        channel[counted] -= mean
        channel[counted] /= max(deviation, 1e-8)
        return channel


def read_channels(files: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """(C, D, H, W) as the files hold it, and the affine."""
    parts, affine = [], np.eye(4)
    for number, file in enumerate(files):
        channels, own = read_volume(file)
        if not all(_finite(channel) for channel in channels):
            raise UsageError(f"{file} holds NaN or infinite values")
        if number and channels.shape[1:] != parts[0].shape[1:]:
            raise UsageError(
                f"{file} has shape {list(channels.shape[1:])} and {files[0]} "
                f"{list(parts[0].shape[1:])}: the channels of a case must be equal in shape"
            )
        affine = affine if number else own
        parts.append(channels)
    return parts[0] if len(parts) == 1 else _joined(parts), affine


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One array whose volumes lie in memory as files have them, which is quickest to copy."""
    c, (d, h, w) = sum(len(part) for part in parts), parts[0].shape[1:]
    together = np.empty((c, w, h, d), np.result_type(*parts)).transpose(0, 3, 2, 1)
    return np.concatenate(parts, out=together)


def _finite(channel: np.ndarray) -> bool:
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite for a network
        return bool(np.isfinite(channel.astype(np.float32, copy=False)).all())


def read_label(file: Path, shape: Sequence[int]) -> np.ndarray:
    """(D, H, W) as the file holds it, which must be its image's shape."""
    channels, _ = read_volume(file)
    if len(channels) != 1:
        raise UsageError(f"{file} must hold one label per voxel, it has {len(channels)} channels")
    if channels.shape[1:] != tuple(shape):
        raise UsageError(
            f"{file} has shape {list(channels.shape[1:])} and its image {list(shape)}: "
            "they must be equal"
        )
    return channels[0]


def preprocess_case(case: Case, preparation: Preprocessing) -> tuple[PreprocessedScan, np.ndarray]:
    """The image of a case and its label (D, H, W), uint8."""
    scan = preparation.scan(case.images)
    return scan, preparation.label(case.label, scan)


def _lists(value: Any) -> Any:
    return [_lists(v) for v in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
