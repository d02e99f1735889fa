"""Settings of `unet3d export`."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.config.values import (
    read,
    read_names,
    read_optional_path,
    read_optional_shape,
    read_path,
    read_paths,
)
from unet3d.errors import UsageError
from unet3d.types import Triple

ENDINGS = {"onnx": ".onnx", "torch_export": ".pt2", "nnunet": "", "bundle": ""}
"""The ending of a file in each format; without one, a folder."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Which checkpoint to export, and how."""

    checkpoints: tuple[Path, ...]
    output: Path
    format: str
    patch_size: Triple | None  # None: as in training
    input: Path | None  # scans to compare on
    allow_targets: tuple[str, ...]


def parse_export(composed: ComposedConfig) -> ExportSettings:
    """Check and parse the config of `unet3d export`."""
    config = composed.config
    name = str(read(config, "format"))
    if name not in ENDINGS:
        near = get_close_matches(name, ENDINGS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"format must be one of {', '.join(ENDINGS)}, got {name!r}{hint}")
    output = read_path(config, "output")
    if output.suffix != ENDINGS[name]:
        others = [f"{k} writes {ending or 'a folder'}" for k, ending in ENDINGS.items()]
        raise UsageError(
            f"output={output} does not fit format={name}: {', '.join(others)}, which has no ending"
        )
    return ExportSettings(
        checkpoints=read_paths(config, "checkpoint"),
        output=output,
        format=name,
        patch_size=read_optional_shape(config, "patch_size"),
        input=read_optional_path(config, "input"),
        allow_targets=read_names(config, "allow_targets"),
    )
