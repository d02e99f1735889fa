"""Write and run torch.export files (.pt2), which load without this package."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from unet3d.errors import RunError
from unet3d.export.program import find_root_cause, suppress_output

METADATA_FILE = "unet3d.json"


def write_torch_export(program: ExportedProgram, path: Path, metadata: Mapping[str, Any]) -> str:
    """Write a .pt2 file and return its format and version.

    The metadata becomes an extra file inside, unet3d.json.
    """
    with suppress_output():
        extra = {METADATA_FILE: json.dumps(metadata, indent=1)}
        torch.export.save(program, path, extra_files=extra)
    return f"torch.export of torch {torch.__version__}"


class ExportedSession:
    """A .pt2 file, run by torch on the CPU."""

    def __init__(self, path: Path):
        try:
            with suppress_output():
                self.module = torch.export.load(path).module()
        except Exception as error:
            raise RunError(
                f"torch cannot load the exported {path.name}: {find_root_cause(error)}"
            ) from error

    def __call__(self, batch: Tensor) -> Tensor:
        """(B, C, D, H, W) -> logits (B, K, D, H, W)."""
        with torch.inference_mode():
            return self.module(batch)
