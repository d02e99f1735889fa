"""`unet3d export checkpoint=... output=net.onnx`: a network for programs that are not this one."""

from collections.abc import Sequence
from pathlib import Path

from unet3d.build.exporting import export as exported
from unet3d.build.objects import Request
from unet3d.commands.run import run


def main(arguments: Sequence[str]) -> int:
    """Export with the overrides of the command line."""
    return run("export", export, arguments)


def export(request: Request, folder: Path) -> int:
    """Write the file and say how equal it is to the checkpoint."""
    print(exported(request))
    return 0
