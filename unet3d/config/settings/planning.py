"""Settings of `unet3d plan`."""

import re
from dataclasses import dataclass

from omegaconf import DictConfig

from unet3d.config.compose import ComposedConfig, compose_config
from unet3d.config.settings.memory import parse_budget
from unet3d.config.settings.training import TrainingSettings, parse_training
from unet3d.config.values import is_text, read, read_bool, read_optional_str
from unet3d.errors import UsageError

PRESET_GIB = {"resenc_m": 8.5, "resenc_l": 21.1, "resenc_xl": 34.1}
"""GPU memory that nnU-Net's documentation states for its presets: 9.1, 22.7 and 36.6 GB."""


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
    preset = read_optional_str(config, "preset")
    if preset is not None:
        if preset not in PRESET_GIB:
            raise UsageError(f"preset must be one of {', '.join(PRESET_GIB)}, got {preset!r}")
        words = [w for w in composed.composition.overrides if w.startswith("model=")]
        if words:
            raise UsageError(f"preset={preset} has its own network: remove {words[0]}")
        composed = compose_config(["model=unet_resenc", *composed.composition.overrides], "plan")
    name = read(config, "name")
    if not is_text(name) or not re.fullmatch(r"[A-Za-z0-9_-]+", str(name)):
        raise UsageError(f"name must consist of letters, digits, - and _, got {name!r}")
    return PlanningSettings(
        training=parse_training(composed),
        budget_gib=_parse_budget(config, preset),
        name=str(name),
        overwrite=read_bool(config, "overwrite"),
        measure_time=read_bool(config, "measure_time"),
    )


def _parse_budget(config: DictConfig, preset: str | None) -> float | None:
    if read(config, "budget_gib") is not None:
        return parse_budget(config)
    if preset is None:
        raise UsageError("budget_gib must be given: GPU memory in GiB, or auto")
    return PRESET_GIB[preset]
