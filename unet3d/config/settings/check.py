"""Settings of `unet3d check`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.data import DataSettings, parse_data
from unet3d.config.values import integer, read_settings


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """Which dataset to check, and how thoroughly."""

    data: DataSettings
    read_voxels: bool
    workers: Annotated[int | None, integer(">= 1")]  # None: one per core
    format: Literal["table", "json"]
    output: Path | None


def parse_check(composed: ComposedConfig) -> CheckSettings:
    """Check and parse the config of `unet3d check`."""
    return read_settings(CheckSettings, composed.config, data=parse_data(composed.config))
