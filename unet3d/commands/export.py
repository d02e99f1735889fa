"""`unet3d export checkpoint=... output=net.onnx`: export a network for other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import one_of, read_settings
from unet3d.errors import UsageError
from unet3d.types import Triple
from unet3d.workflows.export.export_checkpoint import export

ENDINGS = {"onnx": ".onnx", "torch_export": ".pt2", "nnunet": "", "bundle": ""}
"""The ending of a file in each format; without one, a folder."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Which checkpoint to export, and how."""

    checkpoints: Annotated[tuple[Path, ...], "checkpoint"]
    output: Path
    format: Annotated[str, one_of(tuple(ENDINGS))]
    patch_size: Triple | None  # None: as in training
    input: Path | None  # scans to compare on
    allow_targets: tuple[str, ...]

    def __post_init__(self):
        if self.output.suffix != ENDINGS[self.format]:
            others = [f"{k} writes {ending or 'a folder'}" for k, ending in ENDINGS.items()]
            raise UsageError(
                f"output={self.output} does not fit format={self.format}: "
                f"{', '.join(others)}, which has no ending"
            )


def main(composed: ComposedConfig, folder: Path) -> int:
    """Write the file, and say how well it agrees with the checkpoint."""
    print(export(**vars(read_settings(ExportConfig, composed.config))))
    return 0
