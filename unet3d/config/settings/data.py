"""Settings of the dataset: the config group `data`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig

from unet3d.config.instantiate import Factory, read_factory
from unet3d.config.values import (
    is_number,
    read,
    read_annotated,
    read_choice,
    read_float,
    read_int,
    read_optional_int,
    read_optional_labels,
    read_optional_path,
    read_optional_str,
    read_path,
    read_regions,
    read_shape,
)
from unet3d.errors import UsageError
from unet3d.types import CROPS, NORMALIZATIONS, ORIENTATIONS, Triple


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where cases come from, and how they are preprocessed and cut into patches."""

    layout: Factory | None  # finds the cases; None: data.root is not given
    root: Path | None  # None: not given
    num_classes: int | None  # None: as the dataset says
    in_channels: int | None  # None: as the dataset says
    regions: Mapping[str, tuple[int, ...]] | None  # overlapping classes, each with its labels
    region_labels: tuple[int, ...] | None  # that predictions have in each region
    ignore_labels: tuple[int, ...] | None  # None: as the dataset says
    annotated: Any  # classes by pattern of case names, or a file; None: all classes
    unknown_classes: Mapping[int, tuple[int, ...]]  # by label; known once the dataset is
    splits: Path | None
    group_by: str | None
    skip_invalid_cases: bool
    orientation: str
    spacing_mm: tuple[float, float, float] | Literal["median"] | None
    background: tuple[float | str, ...]  # one value for all channels, or one for each
    crop: str
    normalize: tuple[str, ...]  # one method for all channels, or one for each
    cache: Path
    patch_size: Triple
    batch_size: int
    patches_per_case: int
    foreground_fraction: float
    num_workers: int


def parse_data(config: DictConfig) -> DataSettings:
    """Check and parse the group `data`."""
    root = read_optional_path(config, "data.root")
    invalid_cases = read_choice(config, "data.invalid_cases", ("error", "skip"))
    return DataSettings(
        layout=None if root is None else read_factory(config, "data.layout"),
        root=root,
        num_classes=read_optional_int(config, "data.num_classes", minimum=2),
        in_channels=read_optional_int(config, "data.in_channels", minimum=1),
        regions=read_regions(config, "data.regions"),
        region_labels=read_optional_labels(config, "data.region_labels"),
        ignore_labels=_parse_ignore_labels(read(config, "data.ignore_label")),
        annotated=_parse_annotated(config),
        unknown_classes={},
        splits=read_optional_path(config, "data.splits"),
        group_by=read_optional_str(config, "data.group_by"),
        skip_invalid_cases=invalid_cases == "skip",
        orientation=_parse_orientation(read(config, "data.orientation")),
        spacing_mm=_parse_spacing(read(config, "data.spacing_mm")),
        background=_parse_background(read(config, "data.background")),
        crop=read_choice(config, "data.crop", CROPS),
        normalize=_parse_normalizations(read(config, "data.normalize")),
        cache=read_path(config, "data.cache"),
        patch_size=read_shape(config, "data.patch_size"),
        batch_size=read_int(config, "data.batch_size", minimum=1),
        patches_per_case=read_int(config, "data.patches_per_case", minimum=1),
        foreground_fraction=_parse_fraction(config, "data.foreground_fraction"),
        num_workers=read_int(config, "data.num_workers", minimum=0),
    )


def _parse_ignore_labels(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    labels = value if isinstance(value, list) else [value]
    if not all(type(label) is int and label >= 0 for label in labels):
        raise UsageError(f"data.ignore_label must be an int >= 0 or a list of these, got {value!r}")
    return tuple(labels)


def _parse_orientation(value: Any) -> str:
    if not isinstance(value, str) or sorted(value) not in ORIENTATIONS:
        raise UsageError(
            "data.orientation must hold one of L R, one of P A and one of I S, such as RAS, "
            f"got {value!r}"
        )
    return value


def _parse_normalizations(value: Any) -> tuple[str, ...]:
    methods = value if isinstance(value, list) else [value]
    if methods != ["auto"] and not (methods and all(one in NORMALIZATIONS for one in methods)):
        raise UsageError(
            f"data.normalize must be auto, {', '.join(NORMALIZATIONS)}, or a list with one per "
            f"channel, got {value!r}"
        )
    return tuple(methods)


def _parse_annotated(config: DictConfig) -> Any:
    value = read_annotated(config, "data.annotated")
    if value is not None and read(config, "data.regions") is not None:
        raise UsageError("data.annotated cannot be combined with data.regions")
    return value


def _parse_fraction(config: DictConfig, key: str) -> float:
    value = read_float(config, key)
    if value > 1:
        raise UsageError(f"{key} must be in 0..1, got {value:g}")
    return value


def _parse_spacing(value: Any) -> tuple[float, float, float] | Literal["median"] | None:
    if value is None or value == "median":
        return value
    good = isinstance(value, list) and len(value) == 3
    if not good or not all(is_number(s) and s > 0 for s in value):
        raise UsageError(
            f"data.spacing_mm must be three numbers > 0, median or null, got {value!r}"
        )
    d, h, w = (float(s) for s in value)
    return d, h, w


def _parse_background(value: Any) -> tuple[float | str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(one == "auto" or is_number(one) for one in values):
        raise UsageError(
            "data.background must be a number, auto, or a list with one of these per channel, "
            f"got {value!r}"
        )
    return tuple(values)
