"""`unet3d export checkpoint=... output=net.onnx`: a network for programs that are not this one."""

from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.workflows.export.export_checkpoint import export


def main(request: ComposedConfig, folder: Path) -> int:
    """Write the file and say how equal it is to the checkpoint."""
    print(export(request))
    return 0
