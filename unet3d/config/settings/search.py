"""Settings of `unet3d search`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from unet3d.config.compose import ComposedConfig, compose_config
from unet3d.config.settings.training import TrainingSettings, parse_training
from unet3d.config.values import (
    is_number,
    read,
    read_bool,
    read_choice,
    read_float,
    read_int,
    read_str,
)
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
    trials: int
    startup: int
    budget_gib: float | None
    monitor: str
    mode: Literal["max", "min"]
    prune: bool
    prune_after: int
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
    names = [(o, o.lstrip("+~").partition("=")[0]) for o in composed.composition.overrides]
    budget = read(config, "budget_gib")
    training = parse_training(composed)
    if training.trainer.several_processes:
        raise UsageError("search trains each trial in one process: set trainer.devices=1")
    if training.fold is None:
        raise UsageError("search needs validation cases, fold=none has none")
    if training.resume is not None:
        raise UsageError("search goes on by itself: remove resume=")
    settings = SearchSettings(
        overrides=tuple(o for o, name in names if name.split(".")[0] not in OWN_KEYS),
        space=_parse_space(read(config, "space")),
        trials=read_int(config, "trials", minimum=1),
        startup=read_int(config, "startup", minimum=1),
        budget_gib=None if budget is None else read_float(config, "budget_gib", exclusive=True),
        monitor=read_str(config, "monitor"),
        mode="max" if read_choice(config, "mode", ("max", "min")) == "max" else "min",
        prune=read_bool(config, "prune"),
        prune_after=read_int(config, "prune_after", minimum=1),
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
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 1:
        return tuple(_format_value(value) for value in given)
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


def _format_value(value: Any) -> str:
    """Return a value as the command line has it.

    >>> [_format_value(value) for value in (True, None, [1, 2], "max", 0.5)]
    ['true', 'null', '[1,2]', 'max', '0.5']
    """
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_format_value, value))}]"
    return str(value)


def _read_file(file: Path) -> Any:
    if not file.is_file():
        raise UsageError(f"space: no file {file.absolute()}")
    with file.open(encoding="utf-8") as stream:
        return yaml.safe_load(stream)
