"""Settings of `unet3d lr`."""

from dataclasses import dataclass

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.output import OutputSettings, parse_output
from unet3d.config.settings.training import TrainingSettings, parse_training
from unet3d.config.values import read_float, read_int
from unet3d.errors import UsageError

MIN_STEPS = 20
"""Fewer steps show no slope."""


@dataclass(frozen=True, kw_only=True)
class LRSettings:
    """The range of learning rates to test."""

    training: TrainingSettings
    min_lr: float
    max_lr: float
    steps: int
    output: OutputSettings


def parse_lr(composed: ComposedConfig) -> LRSettings:
    """Check and parse the config of `unet3d lr`."""
    config = composed.config
    settings = LRSettings(
        training=parse_training(composed),
        min_lr=read_float(config, "min_lr", exclusive=True),
        max_lr=read_float(config, "max_lr", exclusive=True),
        steps=read_int(config, "steps", minimum=MIN_STEPS),
        output=parse_output(config, ("table", "json", "png")),
    )
    if settings.min_lr >= settings.max_lr:
        raise UsageError(
            f"min_lr must be below max_lr, got {settings.min_lr:g} and {settings.max_lr:g}"
        )
    if settings.output.format == "png" and settings.output.path is None:
        raise UsageError("format=png needs output=FILE.png")
    return settings
