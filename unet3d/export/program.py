"""Export a network to the graph of operators from which both formats are written."""

import logging
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO

import torch
from torch import nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram

from unet3d.errors import RunError, need_packages
from unet3d.types import Triple

INPUT, OUTPUT = "image", "logits"

STANDARD_NAMESPACES = ("aten", "prim", "prims")
"""Namespaces of the operators that every torch has and ONNX can express."""


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
        if isinstance(part, torch.fx.GraphModule):
            check_operators(part)
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)  # contains local paths
    return program


def check_operators(graph: torch.fx.GraphModule) -> None:
    """Reject custom operators, which exist only where their package is installed."""
    for node in graph.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace not in STANDARD_NAMESPACES:
            raise RunError(
                f"the network uses {node.target}, a custom operator that cannot be exported: "
                "replace it in the network with standard torch operators"
            )


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
