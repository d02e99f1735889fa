"""Settings of the dataset: the config group `data`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from unet3d.config.compose import Config
from unet3d.config.fields import (
    ANNOTATED,
    REGIONS,
    SKIP,
    OptionType,
    integer,
    is_number,
    list_of,
    number,
    one_of,
    one_or_list_of,
    read,
    read_settings,
)
from unet3d.config.instantiate import Factory, read_factory
from unet3d.errors import UsageError
from unet3d.types import FloatTriple, Triple

NORMALIZATIONS = {
    "zscore": ("ZScoreNormalization", False),
    "zscore_nonzero": ("ZScoreNormalization", True),
    "ct": ("CTNormalization", False),
    "none": ("NoNormalization", False),
    "rescale_to_0_1": ("RescaleTo01Normalization", False),
    "rgb_to_0_1": ("RGBTo01Normalization", False),
}
"""Values of `data.normalize=`, besides auto: nnU-Net's scheme, and whether it leaves out what its
crop has removed."""

ORIENTATIONS = [sorted(a + b + c) for a in "LR" for b in "AP" for c in "IS"]
"""The letters of each orientation of `data.orientation=`."""

LABELS = list_of(integer(">= 0"), "a list of labels")
ONE_OR_MORE = one_or_list_of(integer())
IGNORED = OptionType(
    "an int or a list of these",
    lambda value: value == [] or ONE_OR_MORE.accepts(value),
    ONE_OR_MORE.convert,
)
ORIENTATION = OptionType(
    "one of L R, one of P A and one of I S, such as RAS",
    lambda value: isinstance(value, str) and sorted(value) in ORIENTATIONS,
)
LABEL_VALUES = OptionType(
    "auto, a file, a list of ints from 0, or a mapping of names to ints",
    lambda value: (
        all(isinstance(name, str) for name in value) and LABELS.accepts(list(value.values()))
        if isinstance(value, dict) and value
        else isinstance(value, str) or (bool(value) and LABELS.accepts(value))
    ),
)
SPACING = list_of(number("above 0"), "three numbers above 0", length=3)
BACKGROUND = one_or_list_of(
    OptionType("a number or auto", lambda value: value == "auto" or is_number(value)),
    "a number, auto, or a list with one of these per channel",
)
METHODS = one_or_list_of(one_of(tuple(NORMALIZATIONS)))
NORMALIZE = OptionType(
    f"auto, {', '.join(NORMALIZATIONS)}, or a list with one per channel",
    lambda value: value in ("auto", ["auto"]) or METHODS.accepts(value),
    METHODS.convert,
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where cases come from, and how they become patches; what is None is as the dataset says."""

    layout: Factory | None  # finds the cases; None: data.root is not given
    root: Path | None  # None: not given
    num_classes: Annotated[int | None, integer(">= 2")]
    in_channels: Annotated[int | None, integer(">= 1")]
    regions: Annotated[Mapping[str, tuple[int, ...]] | None, REGIONS]  # the labels of each
    region_labels: Annotated[tuple[int, ...] | None, LABELS]  # that predictions have in regions
    ignore_labels: Annotated[tuple[int, ...] | None, IGNORED, "ignore_label"]
    label_values: Annotated[Any | None, LABEL_VALUES]  # of each class; None: 0, 1, 2, ...
    annotated: Annotated[Any | None, ANNOTATED]  # None: every case annotates all classes
    unannotated_classes: Mapping[int, tuple[int, ...]]  # by label; known once the dataset is
    splits: Path | None
    group_by: str | None
    skip_invalid_cases: Annotated[bool, SKIP, "invalid_cases"]
    orientation: Annotated[str, ORIENTATION]
    spacing_mm: Annotated[FloatTriple | Literal["median"] | None, SPACING]
    background: Annotated[tuple[float | str, ...], BACKGROUND]  # of all channels, or of each
    crop: Literal["nonzero", "none"]
    normalize: Annotated[tuple[str, ...], NORMALIZE]  # of all channels, or of each
    cache: Path
    cache_format: Literal["npy", "blosc2"]
    patch_size: Triple
    batch_size: Annotated[int, integer(">= 1")]
    patches_per_case: Annotated[int, integer(">= 1")]
    foreground_fraction: Annotated[float, number(">= 0", "<= 1")]
    balance_classes: bool
    num_workers: Annotated[int, integer(">= 0")]

    def __post_init__(self):
        if self.annotated is not None and self.regions is not None:
            raise UsageError("data.annotated cannot be combined with data.regions")


def parse_data_config(config: Config) -> DataConfig:
    """Read the group `data`."""
    root = read(config, "data.root")
    layout = None if root is None else read_factory(config, "data.layout")
    return read_settings(DataConfig, config, "data.", layout=layout, unannotated_classes={})
