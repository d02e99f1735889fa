"""Settings of `unet3d doctor`."""

from dataclasses import dataclass

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.output import OutputSettings, parse_output
from unet3d.config.settings.training import TrainingSettings, parse_training


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Which run to check this machine for."""

    training: TrainingSettings
    output: OutputSettings


def parse_doctor(composed: ComposedConfig) -> DoctorSettings:
    """Check and parse the config of `unet3d doctor`."""
    return DoctorSettings(training=parse_training(composed), output=parse_output(composed.config))
