"""Settings of `unet3d check`, `download`, `compare` and `doctor`."""

from dataclasses import dataclass
from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.data import DataSettings, parse_data
from unet3d.config.settings.output import OutputSettings, parse_output
from unet3d.config.settings.training import TrainingSettings, parse_training
from unet3d.config.values import (
    read_bool,
    read_optional_int,
    read_optional_path,
    read_optional_str,
    read_paths,
)
from unet3d.errors import UsageError


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


@dataclass(frozen=True, kw_only=True)
class DownloadSettings:
    """Which task to download."""

    task: str
    root: Path
    url: str | None
    md5: str | None


def parse_download(composed: ComposedConfig) -> DownloadSettings:
    """Check and parse the config of `unet3d download`."""
    config = composed.config
    return DownloadSettings(
        task=str(config.task),
        root=Path(str(config.root)),
        url=read_optional_str(config, "url"),
        md5=read_optional_str(config, "md5"),
    )


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """Which runs to compare."""

    runs: tuple[Path, ...]
    output: OutputSettings
    picture: Path | None


def parse_compare(composed: ComposedConfig) -> CompareSettings:
    """Check and parse the config of `unet3d compare`."""
    config = composed.config
    output = parse_output(config)
    runs = read_paths(config, "runs")
    if not runs:
        raise UsageError(
            "name the runs: unet3d compare RUN ..., each the folder of a run or one that holds runs"
        )
    for path in runs:
        if not path.exists():
            raise UsageError(f"{path} does not exist")
    return CompareSettings(runs=runs, output=output, picture=read_optional_path(config, "picture"))


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Which run to check this machine for."""

    training: TrainingSettings
    output: OutputSettings


def parse_doctor(composed: ComposedConfig) -> DoctorSettings:
    """Check and parse the config of `unet3d doctor`."""
    return DoctorSettings(training=parse_training(composed), output=parse_output(composed.config))
