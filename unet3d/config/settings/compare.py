"""Settings of `unet3d compare`."""

from dataclasses import dataclass
from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.output import OutputSettings, parse_output
from unet3d.config.values import read, read_optional_path, read_paths
from unet3d.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """Which runs to compare."""

    runs: tuple[Path, ...]
    output: OutputSettings
    report: Path | None
    figure: Path | None


def parse_compare(composed: ComposedConfig) -> CompareSettings:
    """Check and parse the config of `unet3d compare`."""
    config = composed.config
    output = parse_output(config)
    if read(config, "runs") == []:
        raise UsageError(
            "no runs are given: unet3d compare RUN ..., each a run folder or a folder of runs"
        )
    runs = read_paths(config, "runs")
    for path in runs:
        if not path.exists():
            raise UsageError(f"{path} does not exist")
    return CompareSettings(
        runs=runs,
        output=output,
        report=read_optional_path(config, "report"),
        figure=read_optional_path(config, "figure"),
    )
