"""Export a network to the graph of plain operators, and save it as .pt2 for torch alone.

The other formats are written from this graph.
"""

import json
import logging
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram

from unet3d.errors import RunError, need_packages
from unet3d.pool.export_modules import replace_with_plain
from unet3d.types import HasRetention, Triple

INPUT, OUTPUT = "image", "logits"
METADATA_FILE = "unet3d.json"

STANDARD_NAMESPACES = ("aten", "prim", "prims")
"""Namespaces of the operators that every torch has and ONNX can express."""


def to_plain_operators(network: nn.Module) -> nn.Module:
    """Return the network in plain modules and operators; its weights are shared, not copied."""
    weights = [*network.parameters(), *network.buffers()]
    copy = deepcopy(network, {id(weight): weight for weight in weights})
    replace_with_plain(copy)
    if isinstance(copy, HasRetention):
        copy.retention = None
    return copy


def export_program(network: nn.Module, channels: int, patch: Triple) -> ExportedProgram:
    """Return the graph of (batch, C, D, H, W) -> (batch, K, D, H, W), for any batch size.

    D, H and W are fixed to the patch: sliding windows have no other size, networks pad odd sizes
    accordingly, and runtimes plan their memory for it.
    """
    example = torch.zeros(2, channels, *patch)  # a batch of 1 would be specialized
    with suppress_output():
        try:
            batch = Dim("batch", min=1)
            program = torch.export.export(network, (example,), dynamic_shapes=({0: batch},))
        except Exception as error:  # torch raises many kinds
            raise RunError(
                f"{type(network).__name__} cannot be traced by torch.export: "
                f"{find_root_cause(error)}"
            ) from error
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            operator = node.target
            if isinstance(operator, OpOverload) and operator.namespace not in STANDARD_NAMESPACES:
                raise RunError(
                    f"the network uses {operator}, a custom operator that cannot be exported: "
                    "replace it in the network with standard torch operators"
                )
            node.meta.pop("stack_trace", None)  # contains local paths
    return program


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
        with suppress_output():
            self.module = torch.export.load(path).module()

    def __call__(self, batch: Tensor) -> Tensor:
        """(B, C, D, H, W) -> logits (B, K, D, H, W)."""
        with torch.inference_mode():
            return self.module(batch)


def require_packages(key: str, packages: Sequence[str]) -> None:
    """Refuse what `key` asks for if one of these packages is not installed."""
    with need_packages(key, *packages), suppress_output():
        for package in packages:
            import_module(package)


@contextmanager
def suppress_output() -> Generator[None]:
    """Suppress what torch's exporters log and print; errors are still raised."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        sink = StringIO()
        with warnings.catch_warnings(), redirect_stdout(sink), redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)


def find_root_cause(error: BaseException) -> str:
    """Return the first line of the original error, which exporters wrap in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
