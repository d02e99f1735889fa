"""torch.export: a .pt2 that `torch.export.load` reads where this package is not installed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from unet3d.errors import RunError
from unet3d.export.program import find_root_cause, quiet

ENDING = ".pt2"
NEEDS = ()
FACTS = "unet3d.json"


def write_torch_export(program: ExportedProgram, path: Path, facts: Mapping[str, Any]) -> str:
    """Write the file, the facts in it as an extra file, and say what it is."""
    with quiet():
        torch.export.save(program, path, extra_files={FACTS: json.dumps(facts, indent=1)})
    return f"torch.export of torch {torch.__version__}"


class ExportedSession:
    """A file as torch runs it on the CPU."""

    def __init__(self, path: Path):
        try:
            with quiet():
                self.module = torch.export.load(path).module()
        except Exception as error:
            raise RunError(
                f"torch cannot load {path.name} again: {find_root_cause(error)}"
            ) from error

    def __call__(self, batch: Tensor) -> Tensor:
        """(B, C, D, H, W) -> logits (B, K, D, H, W)."""
        with torch.inference_mode():
            return self.module(batch)
