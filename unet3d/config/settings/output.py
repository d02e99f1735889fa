"""Where and how a command prints its result."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from unet3d.config.values import read_choice, read_optional_path

TABLE_FORMATS = ("table", "json")


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """The format, and a file instead of standard output."""

    format: str
    path: Path | None


def parse_output(config: DictConfig, formats: tuple[str, ...] = TABLE_FORMATS) -> OutputSettings:
    """Parse `format` and `output`."""
    return OutputSettings(
        format=read_choice(config, "format", formats), path=read_optional_path(config, "output")
    )
