"""Settings of `unet3d plan`."""

import re
from dataclasses import dataclass

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.memory import parse_budget
from unet3d.config.settings.training import TrainingSettings, parse_training
from unet3d.config.values import read, read_bool
from unet3d.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PlanningSettings:
    """What to plan, and the name of the experiment to write."""

    training: TrainingSettings
    budget_gib: float | None  # None: the memory of this machine's GPU
    name: str
    overwrite: bool
    measure_time: bool


def parse_planning(composed: ComposedConfig) -> PlanningSettings:
    """Check and parse the config of `unet3d plan`."""
    config = composed.config
    name = str(read(config, "name"))
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UsageError(f"name must consist of letters, digits, - and _, got {name!r}")
    return PlanningSettings(
        training=parse_training(composed),
        budget_gib=parse_budget(config),
        name=name,
        overwrite=read_bool(config, "overwrite"),
        measure_time=read_bool(config, "measure_time"),
    )
