"""`unet3d export checkpoint=... output=net.onnx`: export a network for other programs."""

from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.inference import parse_export
from unet3d.workflows.export.export_checkpoint import export


def main(composed: ComposedConfig, folder: Path) -> int:
    """Write the file, and say how well it agrees with the checkpoint."""
    print(export(parse_export(composed)))
    return 0
