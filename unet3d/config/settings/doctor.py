"""Settings of `unet3d doctor`."""

from dataclasses import dataclass

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.output import OutputSettings, parse_output
from unet3d.config.settings.training import TrainingSettings, parse_training
from unet3d.config.values import read_bool, read_float

KEYS = ("benchmark", "seconds", "format", "output", "trainer.accelerator")
"""Keys that leave open which job a benchmark measures."""


BENCHMARK_JOB = ("experiment=forum_small", "model=unet_small", "precision=16")
"""What a benchmark measures on a GPU unless another job is given: it fills one."""


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Which run to check this machine for."""

    training: TrainingSettings
    output: OutputSettings
    benchmark: bool
    seconds: float  # that the benchmark may take
    has_job: bool  # whether overrides say what to run


def parse_doctor(composed: ComposedConfig) -> DoctorSettings:
    """Check and parse the config of `unet3d doctor`."""
    config, training = composed.config, parse_training(composed)
    overrides = training.composition.overrides
    return DoctorSettings(
        training=training,
        output=parse_output(config),
        benchmark=read_bool(config, "benchmark"),
        seconds=read_float(config, "seconds", exclusive=True),
        has_job=any(o.partition("=")[0] not in KEYS for o in overrides),
    )
