"""Build a dataset's layout and preprocessing; choose its classes, split and valid cases."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TypeVar

from unet3d.data.annotated import Annotations, read_annotations
from unet3d.data.case import Case, DatasetDescription, DatasetLayout, Finding, InvalidDatasetError
from unet3d.data.checks import check_headers
from unet3d.data.config import DataConfig
from unet3d.data.label_values import read_label_values
from unet3d.data.layouts.splits import (
    LikelyGroups,
    describe_unused,
    find_likely_groups,
    read_folds,
    read_groups,
)
from unet3d.data.preprocessing.cache import CachedVolume, preprocess_all
from unet3d.data.preprocessing.fingerprint import (
    compute_foreground_intensities,
    compute_median_spacing,
    fingerprint_dataset,
)
from unet3d.data.preprocessing.pipeline import Preprocessing, choose_background
from unet3d.errors import UsageError
from unet3d.text import join_first, pluralize
from unet3d.types import IGNORE_LABEL, MAX_CLASSES

T = TypeVar("T")

SPLITS_FILE = "splits_final.json"
"""nnU-Net's file of folds; it is used where it is in the dataset's folder."""


@dataclass(frozen=True, kw_only=True)
class ResolvedDataset(DatasetDescription):
    """The description of a dataset as the settings complete it."""

    annotations: Annotations | None = None  # None: every case annotates all classes
    label_values: tuple[int, ...] | None = None  # of each class in files; None: 0, 1, 2, ...

    @property
    def label_names(self) -> dict[str, tuple[int, ...]]:
        """Return the value that files have for each class, by its name in lower case."""
        values = self.label_values or range(len(self.classes))
        return {n.casefold(): (v,) for v, n in zip(values, self.classes, strict=True)}

    @property
    def num_outputs(self) -> int:
        """Return the number of the network's outputs: regions have one each, no background."""
        return len(self.classes if self.regions is None else self.regions)


def build_layout(data: DataConfig) -> DatasetLayout:
    """Build the layout, which finds the dataset's cases."""
    if data.layout is None:
        raise UsageError("data.root must be given: the dataset's folder")
    return data.layout()


def resolve_dataset(data: DataConfig, layout: DatasetLayout) -> ResolvedDataset:
    """Complete the settings by what the dataset says; refuse contradictions."""
    description = layout.describe()
    label_values: tuple[int, ...] | None = None
    num_classes, channels = data.num_classes or len(description.classes), description.channels
    names, ignored = description.classes, data.ignore_labels
    if ignored is None:
        ignored = description.ignore_labels
    if data.label_values is not None:
        if data.regions or description.regions:
            raise UsageError(
                "data.label_values cannot be combined with regions, which name labels as files "
                "have them"
            )
        found = read_label_values(data.label_values, layout.list_cases, data.cache, ignored)
        label_values = tuple(found)
        for given in filter(None, (data.num_classes, len(names))):
            if given != len(label_values):
                raise UsageError(
                    f"data.label_values are {len(label_values)} classes, background included, but "
                    f"the settings or the dataset name {given}: correct these, or leave them out"
                )
        unnamed = tuple(f"class_{v}" if v else "background" for v in label_values)
        if names != tuple(f"class_{n}" for n in range(len(names))):  # they are not only numbered
            unnamed = names
        given = data.layout.arguments.get("classes") if data.layout else None
        for (value, own), other in zip(found.items(), given or (), strict=bool(given)):
            if own not in (None, other):
                raise UsageError(
                    f"data.label_values name {value} {own}, and data.classes {other}: name the "
                    "classes in one place"
                )
        num_classes = len(label_values)
        names = tuple(own or other for own, other in zip(found.values(), unnamed, strict=True))
    if not num_classes:
        raise UsageError(
            "files alone do not define their classes: set data.classes=[background, ...] or "
            "data.num_classes=, counting the background, or data.label_values=auto"
        )
    if not 2 <= num_classes <= MAX_CLASSES:
        raise UsageError(f"data.num_classes must be 2..{MAX_CLASSES:,}, got {num_classes}")
    if num_classes > IGNORE_LABEL and (data.annotated or data.regions or description.regions):
        raise UsageError(
            f"data.annotated and data.regions take at most {IGNORE_LABEL} classes, got "
            f"{num_classes}"
        )
    if data.in_channels not in (None, len(channels)):
        raise UsageError(
            f"data.in_channels={data.in_channels}, but the dataset has {len(channels)}: "
            f"{', '.join(channels)}"
        )
    for key, values in (("background", data.background), ("normalize", data.normalize)):
        if len(values) not in (1, len(channels)):
            raise UsageError(
                f"data.{key} must be one value or one for each of the {len(channels)} channels, "
                f"got {list(values)}"
            )
    if len(set(names)) < len(names):
        raise UsageError(f"class names must be unique, got {join_first(names)}")
    classes = (*names, *(f"class_{n}" for n in range(len(names), num_classes)))[:num_classes]
    regions, region_labels = data.regions, data.region_labels
    if regions is None:
        regions = description.regions
        region_labels = region_labels or description.region_labels
    if regions is None and region_labels is not None:
        raise UsageError("data.region_labels needs data.regions, or a dataset with regions")
    for name, labels in (regions or {}).items():
        if any(label not in range(1, num_classes) for label in labels):
            raise UsageError(
                f"data.regions.{name} must be labels of 1..{num_classes - 1}, got {list(labels)}"
            )
    annotations = None
    if regions is not None:
        for (name, part), (later, labels) in combinations(regions.items(), 2):
            if set(part) <= set(labels):
                order = ", ".join(sorted(regions, key=lambda name: -len(regions[name])))
                raise UsageError(
                    f"data.regions.{name} can never be predicted: {later} has all its labels and "
                    f"is written over it: list the regions, and data.region_labels, as {order}"
                )
        get_region_labels(regions, region_labels)  # or no label map can hold them
    if data.annotated is not None:
        if regions is not None:
            raise UsageError("data.annotated cannot be combined with regions of the dataset")
        annotations = read_annotations("data.annotated", data.annotated, classes[1:])
        if min(annotations.unannotated_classes, default=IGNORE_LABEL) < num_classes:
            sets = pluralize(len(annotations.unannotated_classes), "set")
            raise UsageError(
                f"data.annotated: {num_classes} classes and {sets} of annotated ones are more than "
                f"{IGNORE_LABEL} labels"
            )
    if any(label in (label_values or range(num_classes)) for label in ignored):
        known = "data.label_values" if label_values else f"the classes 0..{num_classes - 1}"
        raise UsageError(f"data.ignore_label must be outside of {known}, got {list(ignored)}")
    return ResolvedDataset(
        channels=tuple(channels),
        classes=classes,
        regions=regions,
        region_labels=region_labels,
        ignore_labels=ignored,
        annotations=annotations,
        label_values=label_values,
    )


def get_network_sizes(data: DataConfig) -> tuple[int, int]:
    """Return the network's input channels and outputs; the settings must say both."""
    assert data.in_channels is not None
    assert data.num_classes is not None
    return data.in_channels, len(data.regions or range(data.num_classes))


def get_region_labels(
    regions: Mapping[str, Sequence[int]], labels: Sequence[int] | None = None
) -> list[int]:
    """Return the label that a voxel of each region gets: the one that no later region has.

    `labels` names them instead, one per region.

    >>> get_region_labels({"whole": [1, 2, 3], "core": [2, 3], "enhancing": [3]})
    [1, 2, 3]
    """
    if labels is not None:
        pairs = zip(labels, regions.values(), strict=False)
        if len(labels) != len(regions) or any(label not in part for label, part in pairs):
            raise UsageError(
                "data.region_labels must name a label of each region, in their order, got "
                f"{list(labels)} for {dict(regions)}"
            )
        return list(labels)
    derived: list[int] = []
    parts = list(regions.values())
    for index, (name, part) in enumerate(regions.items()):
        exclusive = set(part).difference(*parts[index + 1 :])
        if len(exclusive) != 1:
            raise UsageError(
                f"data.regions.{name} must have exactly one label that no later region has (list "
                f"the outermost region first) unless data.region_labels is set, it has "
                f"{len(exclusive)}: {sorted(exclusive)}"
            )
        derived += exclusive
    return derived


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """What decides the folds of a dataset: a file, groups of cases, or their number alone."""

    file: Path | None = None
    groups: dict[str, str] | None = None  # of each case, as data.group_by defines them
    likely_groups: LikelyGroups | None = None  # in the names, unless groups have several cases
    note: str | None = None  # about a file of folds


def choose_split(data: DataConfig, cases: Sequence[Case]) -> SplitRule:
    """Return what decides the folds: an option, or nnU-Net's file in the dataset's folder."""
    names = [case.name for case in cases]
    groups = None if data.group_by is None else read_groups(data.group_by, names)
    are_single = groups is None or len({*groups.values()}) == len(names)
    likely = find_likely_groups(names) if are_single else None
    rule = SplitRule(file=data.splits, groups=groups, likely_groups=likely)
    if data.splits is not None:
        rest = describe_unused(read_folds(data.splits, names), names)
        return replace(rule, note=f"folds are those of {data.splits}{rest}" if rest else None)
    file = None if data.root is None else data.root / SPLITS_FILE
    if file is None or not file.is_file():
        return rule
    if groups is not None:
        return replace(rule, note=f"ignored {file}: data.group_by is set")
    try:
        folds = read_folds(file, names)
    except UsageError as reason:
        return replace(rule, note=f"ignored: {reason}")
    note = f"folds are those of {file}{describe_unused(folds, names)}"
    return replace(rule, file=file, note=note)


def build_preprocessing(
    data: DataConfig, dataset: ResolvedDataset, cases: Sequence[Case]
) -> Preprocessing:
    """Build the preprocessing; what depends on the dataset is read from all of its cases."""
    spacing = data.spacing_mm
    if spacing == "median":
        spacing = compute_median_spacing(cases, data.orientation)
    normalize, intensities = choose_normalization(data, dataset.channels), None
    if "ct" in normalize:
        background = choose_background(dataset.channels)  # as `unet3d plan` reads it
        fingerprints = fingerprint_dataset(
            cases, data.orientation, data.cache, background, dataset.ignore_labels
        )
        intensities = compute_foreground_intensities(fingerprints)
    return Preprocessing(
        num_classes=len(dataset.classes),
        orientation=data.orientation,
        spacing_mm=spacing,
        background=data.background,
        crop=data.crop,
        normalize=normalize,
        intensities=intensities,
        ignore_labels=dataset.ignore_labels,
        label_values=dataset.label_values,
    )


METHODS_BY_NAME = {
    "ct": "ct",
    "nonorm": "none",
    "rescale_to_0_1": "rescale_to_0_1",
    "rgb_to_0_1": "rgb_to_0_1",
}
"""Methods of channels by their names, as in nnU-Net."""


def choose_normalization(
    data: DataConfig, channels: Sequence[str], *, usual: str | None = None
) -> tuple[str, ...]:
    """Return the method of each channel; `usual` is that of channels whose name says nothing."""
    if data.normalize == ("auto",):
        usual = usual or ("zscore" if set(data.background) == {0} else "zscore_nonzero")
        return tuple(METHODS_BY_NAME.get(name.casefold(), usual) for name in channels)
    return data.normalize * len(channels) if len(data.normalize) == 1 else data.normalize


class ValidCases:
    """Cases of a dataset, with what data.invalid_cases says about those that cannot be used."""

    def __init__(self, data: DataConfig, layout: DatasetLayout, dataset: ResolvedDataset):
        import torch  # here alone

        from unet3d.machine import get_available_bytes

        self.data, self.cases = data, layout.list_cases()
        self.skipped: list[Finding] = []
        self.ram = get_available_bytes(torch.device("cpu"))
        headers = check_headers(
            self.cases,
            channels=len(dataset.channels),
            ram=self.ram,
            label_names=dataset.label_names,
        )
        findings = [*layout.find_problems(), *headers]
        self.hints = [finding for finding in findings if finding.is_hint]
        self.handle_findings(findings)

    def handle_findings(self, findings: Sequence[Finding]) -> None:
        """Raise, or skip the cases that these findings name."""
        findings = [finding for finding in findings if finding.case is not None]
        invalid = {finding.case for finding in findings}
        self.cases = [case for case in self.cases if case.name not in invalid]
        if findings and not self.data.skip_invalid_cases:
            raise InvalidDatasetError(findings)
        if findings and not self.cases:
            raise InvalidDatasetError([*self.skipped, *findings], skips=True)
        self.skipped += findings

    def run_on_valid_cases(self, work: Callable[[list[Case]], T]) -> T:
        """Call `work` with the valid cases, again without those that it finds to be invalid."""
        while True:  # other problems may be found in the cases that are left
            try:
                return work(self.cases)
            except InvalidDatasetError as error:
                self.handle_findings(error.findings)

    def preprocess(
        self, parts: Sequence[Sequence[Case]], preprocessing: Preprocessing
    ) -> tuple[list[CachedVolume], ...]:
        """Return the preprocessed volumes of each part of the cases."""
        wanted = {case.name for part in parts for case in part}

        def work(cases: list[Case]) -> list[CachedVolume]:
            usable = [case for case in cases if case.name in wanted]
            return preprocess_all(
                usable, preprocessing, self.data.cache, self.data.cache_format, ram=self.ram
            )

        volumes = {volume.name: volume for volume in self.run_on_valid_cases(work)}
        return tuple([volumes[c.name] for c in part if c.name in volumes] for part in parts)
