"""Settings of `unet3d search`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from unet3d.config.comments import to_yaml_literal
from unet3d.config.compose import ComposedConfig, compose_config
from unet3d.config.settings.training import TrainingSettings, parse_training
from unet3d.config.values import integer, is_number, number, read, read_settings
from unet3d.errors import UsageError

OWN_KEYS = (
    *("space", "trials", "startup", "budget_gib", "monitor", "mode"),
    *("prune", "prune_after"),
)
"""Keys that `unet3d train` does not have."""

RANGE_KEYS = {"low", "high", "log", "step"}


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`; ints if both are."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    @property
    def is_integer(self) -> bool:
        """Return whether the numbers are ints."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Dimension = Range | tuple[str, ...]
"""A range of numbers, or values as the command line has them."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What to vary, and how long to search."""

    overrides: tuple[str, ...]  # of every trial
    space: Mapping[str, Dimension]  # by key
    trials: Annotated[int, integer(">= 1")]
    startup: Annotated[int, integer(">= 1")]
    budget_gib: Annotated[float | None, number("above 0")]
    monitor: str
    mode: Literal["max", "min"]
    prune: bool
    prune_after: Annotated[int, integer(">= 1")]
    seed: int

    def check_space(self) -> None:
        """Refuse keys and values that a run does not take, before the first trial."""
        self.make_trial(self.first_values)
        for key, values in self.space.items():
            for value in () if isinstance(values, Range) else values[1:]:
                self.make_trial({**self.first_values, key: value})

    @property
    def first_values(self) -> dict[str, Any]:
        """Return the first value of each key, or the lowest of its range."""
        return {k: d.low if isinstance(d, Range) else d[0] for k, d in self.space.items()}

    def make_trial(self, values: Mapping[str, Any]) -> TrainingSettings:
        """Return the settings of a trial with these values, which goes on where it was stopped."""
        own = [f"{key}={value}" for key, value in values.items()]
        composed = compose_config([*self.overrides, *own], "train")
        return replace(parse_training(composed), resume="auto")


def parse_search(composed: ComposedConfig) -> SearchSettings:
    """Check and parse the config of `unet3d search`."""
    config = composed.config
    training = parse_training(composed)
    if training.trainer.several_processes:
        raise UsageError("search trains each trial in one process: set trainer.devices=1")
    if training.fold is None:
        raise UsageError("search needs validation cases, fold=none has none")
    if training.resume is not None:
        raise UsageError("search goes on by itself: remove resume=")
    overrides = composed.composition.overrides
    settings = read_settings(
        SearchSettings,
        config,
        overrides=tuple(
            o for o in overrides if re.split("[.=]", o.lstrip("+~"))[0] not in OWN_KEYS
        ),
        space=_parse_space(read(config, "space")),
        seed=training.seed,
    )
    settings.check_space()
    return settings


def _parse_space(value: Any) -> dict[str, Dimension]:
    if isinstance(value, str):
        value = _read_file(Path(value))
    if not isinstance(value, dict) or not value:
        raise UsageError(
            "space must be keys with what to try, as in space={pool:[max,median]}, or a file of "
            f"these, got {value!r}"
        )
    return {str(key): _parse_dimension(f"space.{key}", given) for key, given in value.items()}


def _parse_dimension(key: str, given: Any) -> Dimension:
    if isinstance(given, list) and len(given) > 1:
        return tuple(map(to_yaml_literal, given))
    if not isinstance(given, dict) or not {"low", "high"} <= given.keys() <= RANGE_KEYS:
        raise UsageError(
            f"{key} must be a list of two values or more, or {{low: NUMBER, high: NUMBER}} with "
            f"log: true or step: NUMBER, got {given!r}"
        )
    dimension = Range(**given)
    low, high, step = dimension.low, dimension.high, dimension.step
    if not (is_number(low) and is_number(high) and low < high):
        raise UsageError(f"{key} needs numbers with low < high, got {low!r} and {high!r}")
    if not isinstance(dimension.log, bool) or (dimension.log and (low <= 0 or step is not None)):
        raise UsageError(f"{key} with log: true needs low > 0 and no step, got {given!r}")
    if step is not None and not (is_number(step) and step > 0):
        raise UsageError(f"{key}.step must be a number > 0, got {step!r}")
    if dimension.is_integer and not isinstance(step, int | None):
        raise UsageError(f"{key}.step must be an int, as low and high are, got {step!r}")
    return dimension


def _read_file(file: Path) -> Any:
    if not file.is_file():
        raise UsageError(f"space: no file {file.absolute()}")
    with file.open(encoding="utf-8") as stream:
        return yaml.safe_load(stream)
