"""Settings of `unet3d export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unet3d.config.compose import ComposedConfig
from unet3d.config.values import one_of, read_settings
from unet3d.errors import UsageError
from unet3d.types import Triple

ENDINGS = {"onnx": ".onnx", "torch_export": ".pt2", "nnunet": "", "bundle": ""}
"""The ending of a file in each format; without one, a folder."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Which checkpoint to export, and how."""

    checkpoints: Annotated[tuple[Path, ...], "checkpoint"]
    output: Path
    format: Annotated[str, one_of(tuple(ENDINGS))]
    patch_size: Triple | None  # None: as in training
    input: Path | None  # scans to compare on
    allow_targets: tuple[str, ...]


def parse_export(composed: ComposedConfig) -> ExportSettings:
    """Check and parse the config of `unet3d export`."""
    settings = read_settings(ExportSettings, composed.config)
    if settings.output.suffix != ENDINGS[settings.format]:
        others = [f"{k} writes {ending or 'a folder'}" for k, ending in ENDINGS.items()]
        raise UsageError(
            f"output={settings.output} does not fit format={settings.format}: "
            f"{', '.join(others)}, which has no ending"
        )
    return settings
