"""Build a dataset's layout and its preprocessing; ask it for channels and classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unet3d.data.annotated import Annotations, read_annotations
from unet3d.data.case import Case, DatasetDescription, DatasetLayout
from unet3d.data.config import DataConfig
from unet3d.data.layouts.groups import LikelyGroups, find_likely_groups, read_groups
from unet3d.data.layouts.splits import read_folds
from unet3d.data.preprocessing.fingerprint import (
    compute_foreground_intensities,
    compute_median_spacing,
    fingerprint_dataset,
)
from unet3d.data.preprocessing.pipeline import Preprocessing, choose_background
from unet3d.errors import UsageError
from unet3d.text import NAME_RULE, is_name

SPLITS_FILE = "splits_final.json"
"""nnU-Net's file of folds; it is used where it is in the dataset's folder."""


@dataclass(frozen=True, kw_only=True)
class ResolvedDataset:
    """What the settings and the dataset together say of channels and classes."""

    channels: tuple[str, ...]
    classes: tuple[str, ...]  # of the labels 0, 1, 2, ...; the background first
    regions: Mapping[str, tuple[int, ...]] | None
    region_labels: tuple[int, ...] | None  # that predictions have in each region
    ignore_labels: tuple[int, ...]
    annotations: Annotations | None = None  # None: every case annotates all classes

    @property
    def num_outputs(self) -> int:
        """Return the number of the network's outputs: regions have one each, no background."""
        return len(self.classes if self.regions is None else self.regions)


def build_layout(data: DataConfig) -> DatasetLayout:
    """Build the layout, which finds the dataset's cases."""
    if data.layout is None:
        raise UsageError("data.root must be given: the dataset's folder")
    return data.layout()


def resolve_dataset(data: DataConfig, description: DatasetDescription) -> ResolvedDataset:
    """Complete the settings by what the dataset says; refuse contradictions."""
    num_classes = data.num_classes or len(description.classes)
    in_channels = data.in_channels or len(description.channels)
    if num_classes < 2:
        raise UsageError(f"data.num_classes must be an int >= 2, got {num_classes}")
    if in_channels != len(description.channels):
        raise UsageError(
            f"data.in_channels={in_channels}, but the dataset has {len(description.channels)}: "
            f"{', '.join(description.channels)}"
        )
    if len(set(description.classes)) < len(description.classes):
        raise UsageError(f"class names must be unique, got {', '.join(description.classes)}")
    for name in (*description.classes, *description.channels):
        if not is_name(name):
            raise UsageError(f"{name!r} cannot be the name of a class or a channel: {NAME_RULE}")
    unnamed = (f"class_{n}" for n in range(len(description.classes), num_classes))
    regions, region_labels = data.regions, data.region_labels
    if regions is None:
        regions = description.regions
        region_labels = region_labels or description.region_labels
    if regions is None and region_labels is not None:
        raise UsageError("data.region_labels needs data.regions, or a dataset with regions")
    classes = (*description.classes, *unnamed)[:num_classes]
    if data.annotated is not None and regions is not None:
        raise UsageError("data.annotated cannot be combined with regions, which the dataset has")
    return ResolvedDataset(
        channels=tuple(description.channels),
        classes=classes,
        annotations=None
        if data.annotated is None
        else read_annotations("data.annotated", data.annotated, classes[1:]),
        regions=None if regions is None else check_regions(regions, num_classes, region_labels),
        region_labels=region_labels,
        ignore_labels=description.ignore_labels
        if data.ignore_labels is None
        else data.ignore_labels,
    )


def get_network_sizes(data: DataConfig) -> tuple[int, int]:
    """Return the network's input channels and outputs; the settings must say both."""
    assert data.in_channels is not None
    assert data.num_classes is not None
    if data.regions is not None:
        checked = check_regions(data.regions, data.num_classes, data.region_labels)
        return data.in_channels, len(checked)
    return data.in_channels, data.num_classes


def check_regions(
    regions: Mapping[str, Sequence[int]],
    num_classes: int,
    region_labels: Sequence[int] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Refuse regions of labels that are not foreground classes, or that no label map can hold."""
    for name, labels in regions.items():
        if any(label not in range(1, num_classes) for label in labels):
            raise UsageError(
                f"data.regions.{name} must be labels of 1..{num_classes - 1}, got {list(labels)}"
            )
    get_region_labels(regions, region_labels)
    return {name: tuple(labels) for name, labels in regions.items()}


def get_region_labels(
    regions: Mapping[str, Sequence[int]], labels: Sequence[int] | None = None
) -> list[int]:
    """Return the label that a voxel of each region gets: the one that no later region has.

    `labels` names them instead, one per region.

    >>> get_region_labels({"whole": [1, 2, 3], "core": [2, 3], "enhancing": [3]})
    [1, 2, 3]
    """
    if labels is not None:
        named = zip(regions.items(), labels, strict=False)
        wrong = [f"{label} for {name}" for (name, part), label in named if label not in part]
        if len(labels) != len(regions):
            wrong = [f"{len(labels)} labels for {len(regions)} regions"]
        if wrong:
            raise UsageError(
                "data.region_labels must name a label of each region, in their order, got "
                f"{wrong[0]}"
            )
        return list(labels)
    derived: list[int] = []
    parts = list(regions.values())
    for index, (name, part) in enumerate(regions.items()):
        own = set(part).difference(*parts[index + 1 :])
        if len(own) != 1:
            raise UsageError(
                f"data.regions.{name} must have exactly one label that no later region has (list "
                f"the outermost region first) unless data.region_labels is set, it has {len(own)}: "
                f"{sorted(own)}"
            )
        derived += own
    return derived


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """What decides the folds of a dataset: a file, groups of cases, or their number alone."""

    file: Path | None = None
    groups: dict[str, str] | None = None  # of each case, as data.group_by defines them
    likely_groups: LikelyGroups | None = None  # in the names, where nothing decides
    note: str | None = None  # about a file of folds that no option names


def choose_split(data: DataConfig, cases: Sequence[Case]) -> SplitRule:
    """Return what decides the folds: an option, or nnU-Net's file in the dataset's folder."""
    names = [case.name for case in cases]
    groups = None if data.group_by is None else read_groups(data.group_by, names)
    if groups is None and data.splits is None:
        rule = SplitRule(likely_groups=find_likely_groups(names))
    else:
        rule = SplitRule(file=data.splits, groups=groups)
    file = None if data.root is None else data.root / SPLITS_FILE
    if data.splits is not None or file is None or not file.is_file():
        return rule
    if groups is not None:
        return replace(rule, note=f"ignored {file}: data.group_by is set")
    try:
        folds = read_folds(file, names)
    except UsageError as reason:
        return replace(rule, note=f"ignored: {reason}")
    unused = set(names).difference(*(part for fold in folds for part in fold))
    rest = f", in which {len(unused)} of {len(names)} cases do not occur" if unused else ""
    return SplitRule(file=file, note=f"folds are those of {file}{rest}")


def build_preprocessing(
    data: DataConfig, dataset: ResolvedDataset, cases: Sequence[Case]
) -> Preprocessing:
    """Build the preprocessing; what depends on the dataset is read from all of its cases."""
    spacing = data.spacing_mm
    if spacing == "median":
        spacing = compute_median_spacing(cases, data.orientation)
    normalize = _choose_normalization(data, dataset.channels)
    fingerprints = None
    if "ct" in normalize:
        background = choose_background(dataset.channels)  # as `unet3d plan` reads it
        fingerprints = fingerprint_dataset(cases, data.orientation, data.cache, background)
    return Preprocessing(
        num_classes=len(dataset.classes),
        orientation=data.orientation,
        spacing_mm=spacing,
        background=data.background,
        crop=data.crop,
        normalize=normalize,
        intensities=None if fingerprints is None else compute_foreground_intensities(fingerprints),
        ignore_labels=dataset.ignore_labels,
    )


def _choose_normalization(data: DataConfig, channels: Sequence[str]) -> tuple[str, ...]:
    if len(data.normalize) not in (1, len(channels)):
        raise UsageError(
            f"data.normalize must be one word or one for each of the {len(channels)} channels, "
            f"got {list(data.normalize)}"
        )
    if data.normalize == ("auto",):
        usual = "zscore" if set(data.background) == {0} else "zscore_nonzero"
        return tuple("ct" if name.upper() == "CT" else usual for name in channels)
    return data.normalize * len(channels) if len(data.normalize) == 1 else data.normalize
