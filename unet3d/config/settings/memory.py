"""Settings of `unet3d memory` and `unet3d suggest`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from unet3d.config.compose import ComposedConfig, list_options
from unet3d.config.settings.training import TrainingSettings, parse_training
from unet3d.config.values import (
    PRECISION,
    Kind,
    integer,
    list_of,
    number,
    one_of,
    one_or_list_of,
    read_settings,
    word_or,
)
from unet3d.errors import UsageError
from unet3d.types import Triple

VARIABLE_SETTINGS = (
    *("resolution", "batch", "padding", "kernel"),
    *("channels", "pool", "precision", "checkpointing"),
)
BUDGET = word_or("auto", number("above 0"))
VERSION = Kind(  # YAML takes it for a number: 9.10 would be 9.1
    "a version with three parts, such as 9.10.2",
    lambda v: isinstance(v, str) and bool(re.match(r"\d+\.\d+", v)),
)
PRECISIONS = list_of(PRECISION, f"a list of {PRECISION.words}")
STRATEGIES = list_of(
    one_of(list_options("checkpointing")), f"a list of {', '.join(list_options('checkpointing'))}"
)
PATCHES = one_or_list_of(number("above 0", "<= 4"), "fractions of data.patch_size in 0..4")


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Which estimate to show, and how."""

    training: TrainingSettings
    view: Literal["peak", "layers", "timeline"]
    format: Literal["table", "json", "png"]
    output: Path | None
    volume: Triple | None  # of a validation case; None: data.patch_size
    measure: bool
    vary: Annotated[str | None, one_of(VARIABLE_SETTINGS)]
    cudnn: Annotated[str | None, VERSION]  # to estimate for; None: the installed one


def parse_memory(composed: ComposedConfig) -> MemorySettings:
    """Check and parse the config of `unet3d memory`."""
    settings = read_settings(MemorySettings, composed.config, training=parse_training(composed))
    is_figure = settings.format == "png"
    if settings.vary is None and settings.view == "timeline" and not is_figure:
        raise UsageError("view=timeline is a figure: add format=png output=FILE.png")
    if settings.vary is None and settings.view == "peak" and is_figure:
        raise UsageError("format=png draws view=timeline or view=layers: select one of them")
    if is_figure and settings.output is None:
        raise UsageError("format=png needs output=FILE.png")
    return settings


@dataclass(frozen=True, kw_only=True)
class SuggestSettings:
    """What to search for the configs that fit a budget."""

    training: TrainingSettings
    budget_gib: Annotated[float | None, BUDGET]  # None: the memory of this machine's GPU
    precisions: Annotated[tuple[str, ...], PRECISIONS]
    strategies: Annotated[tuple[str, ...] | None, STRATEGIES]  # None: all of the network's
    patches: Annotated[tuple[float, ...], PATCHES]
    top: Annotated[int, integer(">= 1")]
    format: Literal["table", "json"]
    output: Path | None


def parse_suggest(composed: ComposedConfig) -> SuggestSettings:
    """Check and parse the config of `unet3d suggest`."""
    return read_settings(SuggestSettings, composed.config, training=parse_training(composed))
