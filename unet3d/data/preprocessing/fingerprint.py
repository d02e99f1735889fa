"""Fingerprint a dataset: sizes, spacings, intensities and class frequencies."""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from unet3d.control_groups import count_usable_cores
from unet3d.data.case import Case
from unet3d.data.formats.volume_format import Grid
from unet3d.data.formats.volumes import read_header, read_labels
from unet3d.data.preprocessing.cache import (
    VALUES,
    Entry,
    digest_cases,
    load_or_make,
    make_key,
    map_array,
)
from unet3d.data.preprocessing.channels import (
    AUTO,
    FileGrid,
    Intensity,
    find_background,
    find_nonzero_box,
    find_orientation,
    get_spacing,
    reorient,
)
from unet3d.data.preprocessing.pipeline import Background, read_channels
from unet3d.data.preprocessing.statistics import to_tuples
from unet3d.files import read_json
from unet3d.types import FloatTriple

MAX_SAMPLES = 10_000  # foreground voxels per case whose intensities are sampled

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CaseFingerprint:
    """The fingerprint of a case after reorientation and cropping to the foreground."""

    shape: tuple[int, ...]
    crop_fraction: float  # fraction of the file's voxels that the crop keeps
    spacing_mm: tuple[float, ...]
    voxels: dict[int, int]  # of each label
    centers: dict[int, tuple[float, ...]]  # mean position of each label's voxels but those of 0
    intensities: np.ndarray  # (C, N): of sampled foreground voxels
    background: tuple[float, ...]  # of each channel

    def with_classes(self, values: Sequence[int] | None) -> "CaseFingerprint":
        """Return the fingerprint with classes for labels, given the value of each."""
        if values is None:
            return self
        voxels, centers = (
            {n: found[value] for n, value in enumerate(values) if value in found}
            for found in (self.voxels, self.centers)
        )
        return replace(self, voxels=voxels, centers=centers)


def compute_median_spacing(cases: Sequence[Case], code: str) -> FloatTriple:
    """Compute the median spacing along each axis from the headers."""
    spacings = []
    for case in cases:
        affine = read_header(case.images[0]).affine
        spacings.append(get_spacing(affine, find_orientation(affine, code)[0]))
    return tuple(np.median(spacings, axis=0).tolist())


def fingerprint_dataset(
    cases: Sequence[Case],
    code: str,
    cache: Path,
    background: Background = (AUTO,),
    ignored: Sequence[int] = (),
) -> list[CaseFingerprint]:
    """Return the fingerprint of every case, from the cache if it is there."""
    folder = cache / "fingerprints"
    folder.mkdir(parents=True, exist_ok=True)
    contents = digest_cases(cases, cache)

    def make(case: Case) -> Entry:
        values = asdict(fingerprint_case(case, code, background, ignored))
        return {"intensities": values.pop("intensities")}, values

    def choose_threads(missing: Sequence[Case]) -> int:
        log.info("reading %d cases for the dataset's fingerprint", len(missing))
        return min(4, count_usable_cores())

    return load_or_make(
        {case: folder / make_key(code, background, ignored, *contents[case]) for case in cases},
        load=_load,
        make=make,
        choose_threads=choose_threads,
    )


def compute_foreground_intensities(
    fingerprints: Sequence[CaseFingerprint],
) -> tuple[Intensity, ...]:
    """Return each channel's foreground statistics over all cases, for `normalize=ct`."""
    values = np.concatenate([f.intensities for f in fingerprints], axis=1).astype(float)
    if not values.size:
        return tuple((0.0, 1.0, -np.inf, np.inf) for _ in values)
    low, high = np.percentile(values, (0.5, 99.5), axis=1)
    rows = np.stack([values.mean(1), values.std(1), low, high], axis=1)
    return to_tuples(rows.tolist())


def _load(case: Case, folder: Path) -> CaseFingerprint:
    values = {key: to_tuples(value) for key, value in read_json(folder / VALUES).items()}
    for key in ("voxels", "centers"):
        values[key] = {int(label): to_tuples(value) for label, value in values[key].items()}
    return CaseFingerprint(**values, intensities=np.array(map_array(folder, "intensities")))


def fingerprint_case(
    case: Case, code: str, background: Background = (AUTO,), ignored: Sequence[int] = ()
) -> CaseFingerprint:
    """Read a case and compute its fingerprint; ignored voxels are no foreground."""
    channels, affine = read_channels(case.images)
    labels, _ = read_labels(case.label, Grid(shape=channels.shape[1:], affine=affine))
    axes, flips = find_orientation(affine, code)
    values = find_background(channels, background)
    box = find_nonzero_box(reorient(channels, axes, flips), values)
    grid = FileGrid(file_shape=labels.shape, axes=axes, flips=flips, box=box, shape=labels.shape)
    channels, labels = grid.crop(channels), grid.crop(labels)
    foreground = np.nonzero((labels > 0) & ~np.isin(labels, ignored))
    if len(foreground[0]) > MAX_SAMPLES:
        chosen = np.random.default_rng(0).choice(len(foreground[0]), MAX_SAMPLES, replace=False)
        foreground = tuple(indices[chosen] for indices in foreground)
    voxels, centers = locate_labels(labels)
    return CaseFingerprint(
        shape=labels.shape,
        crop_fraction=labels.size / float(np.prod(grid.file_shape)),
        spacing_mm=get_spacing(affine, axes),
        voxels=voxels,
        centers=centers,
        intensities=np.stack([channel[foreground] for channel in channels]).astype(np.float32),
        background=tuple(values),
    )


def locate_labels(labels: np.ndarray) -> tuple[dict[int, int], dict[int, tuple[float, ...]]]:
    """Return the number of voxels of each label of (D, H, W), and mean positions but that of 0."""
    voxels: Counter[int] = Counter()
    sums: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(3))
    for depth, plane in enumerate(labels):  # sorting a whole volume needs memory
        foreground = np.nonzero(plane)
        present, inverse = np.unique(plane[foreground], return_inverse=True)
        counts, *positions = (np.bincount(inverse, weights) for weights in (None, *foreground))
        voxels[0] += plane.size - len(inverse)
        for label, count, *position in zip(present.tolist(), counts, *positions, strict=True):
            voxels[label] += int(count)
            sums[label] += (depth * count, *position)
    centers = {label: tuple((sums[label] / voxels[label]).tolist()) for label in sorted(sums)}
    return {label: count for label, count in sorted(voxels.items()) if count}, centers
