"""Settings of `unet3d memory` and `unet3d suggest`."""

import re
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from unet3d.config.compose import ComposedConfig, list_options
from unet3d.config.settings.output import OutputSettings, parse_output
from unet3d.config.settings.training import TrainingSettings, parse_precision, parse_training
from unet3d.config.values import (
    is_number,
    read,
    read_bool,
    read_choice,
    read_int,
    read_names,
    read_optional_shape,
)
from unet3d.errors import UsageError
from unet3d.types import Triple

VARIABLE_SETTINGS = (
    *("resolution", "batch", "padding", "kernel"),
    *("channels", "pool", "precision", "checkpointing"),
)

VIEWS = ("peak", "layers", "timeline")


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Which estimate to show, and how."""

    training: TrainingSettings
    view: str
    output: OutputSettings
    volume: Triple | None  # of a validation case; None: data.patch_size
    measure: bool
    vary: str | None
    cudnn: str | None  # version to estimate for; None: the installed one


def parse_memory(composed: ComposedConfig) -> MemorySettings:
    """Check and parse the config of `unet3d memory`."""
    config = composed.config
    vary = read(config, "vary")
    settings = MemorySettings(
        training=parse_training(composed),
        view=read_choice(config, "view", VIEWS),
        output=parse_output(config, ("table", "json", "png")),
        volume=read_optional_shape(config, "volume"),
        measure=read_bool(config, "measure"),
        vary=None if vary is None else read_choice(config, "vary", VARIABLE_SETTINGS),
        cudnn=_parse_version(config),
    )
    is_figure = settings.output.format == "png"
    if settings.vary is None and settings.view == "timeline" and not is_figure:
        raise UsageError("view=timeline is a figure: add format=png output=FILE.png")
    if settings.vary is None and settings.view == "peak" and is_figure:
        raise UsageError("format=png draws view=timeline or view=layers: select one of them")
    if is_figure and settings.output.path is None:
        raise UsageError("format=png needs output=FILE.png")
    return settings


def _parse_version(config: DictConfig) -> str | None:
    """Read a version, which YAML takes for a number: 9.10 would be 9.1."""
    value = read(config, "cudnn")
    if value is not None and not (isinstance(value, str) and re.match(r"\d+\.\d+", value)):
        raise UsageError(f"cudnn must be a version with three parts, such as 9.10.2, got {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class SuggestSettings:
    """What to search for the configs that fit a budget."""

    training: TrainingSettings
    budget_gib: float | None  # None: the memory of this machine's GPU
    precisions: tuple[str, ...]
    strategies: tuple[str, ...] | None  # None: all that the network supports
    patches: tuple[float, ...]  # fractions of data.patch_size
    top: int
    output: OutputSettings


def parse_suggest(composed: ComposedConfig) -> SuggestSettings:
    """Check and parse the config of `unet3d suggest`."""
    config = composed.config
    precisions = read_names(config, "precisions")
    if not precisions:
        raise UsageError("precisions must be a list of one or more, got []")
    return SuggestSettings(
        training=parse_training(composed),
        budget_gib=parse_budget(config),
        precisions=tuple(parse_precision(name, "precisions") for name in precisions),
        strategies=_parse_strategies(config),
        patches=_parse_fractions(read(config, "patches")),
        top=read_int(config, "top", minimum=1),
        output=parse_output(config),
    )


def parse_budget(config: DictConfig) -> float | None:
    """Parse `budget_gib`; None stands for auto."""
    value = read(config, "budget_gib")
    if value == "auto":
        return None
    if not is_number(value) or value <= 0:
        raise UsageError(f"budget_gib must be auto or a number above 0, got {value!r}")
    return float(value)


def _parse_strategies(config: DictConfig) -> tuple[str, ...] | None:
    if read(config, "strategies") is None:
        return None
    names, known = read_names(config, "strategies"), list_options("checkpointing")
    if not names or not set(names) <= set(known):
        raise UsageError(f"strategies must be a list of {', '.join(known)}, got {list(names)}")
    return names


def _parse_fractions(value: Any) -> tuple[float, ...]:
    fractions = value if isinstance(value, list) and value else [value]
    for fraction in fractions:
        if not is_number(fraction) or not 0 < fraction <= 4:
            raise UsageError(
                f"patches must be fractions of data.patch_size in 0..4, got {fraction!r}"
            )
    return tuple(map(float, fractions))
