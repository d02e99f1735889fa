"""Settings of `unet3d check`."""

from dataclasses import dataclass

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.data import DataSettings, parse_data
from unet3d.config.settings.output import OutputSettings, parse_output
from unet3d.config.values import read_bool, read_optional_int


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """Which dataset to check, and how thoroughly."""

    data: DataSettings
    read_voxels: bool
    workers: int | None  # None: one per core
    output: OutputSettings


def parse_check(composed: ComposedConfig) -> CheckSettings:
    """Check and parse the config of `unet3d check`."""
    config = composed.config
    return CheckSettings(
        data=parse_data(config),
        read_voxels=read_bool(config, "read_voxels"),
        workers=read_optional_int(config, "workers", minimum=1),
        output=parse_output(config),
    )
