"""From a network to the graph of operators that both formats are written from."""

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO

import torch
from torch import nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram

from unet3d.errors import RunError
from unet3d.types import Triple

INPUT, OUTPUT = "image", "logits"

KNOWN = ("aten", "prim", "prims")
"""Whose operators every torch has, and ONNX a word for."""


def export_program(network: nn.Module, channels: int, patch: Triple) -> ExportedProgram:
    """The graph of (batch, C, D, H, W) -> (batch, K, D, H, W), for a batch of any size.

    Space is fixed to the patch: a window of a volume is never of another size, a network goes by
    it as it fits odd maps to each other, and runtimes plan their memory by it.
    """
    example = torch.zeros(2, channels, *patch)  # a batch of one would be taken for ever
    with quiet():
        try:
            batch = Dim("batch", min=1)
            program = torch.export.export(network, (example,), dynamic_shapes=({0: batch},))
        except Exception as error:  # whatever torch makes of what a network does
            raise RunError(
                f"{type(network).__name__} cannot be traced by torch.export: {find_root_cause(error)}"
            ) from error
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            check_operators(part)
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)  # paths of the machine that exports
    return program


def check_operators(graph: torch.fx.GraphModule) -> None:
    """An operator that a package brings along would be missing wherever that is not installed."""
    for node in graph.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace not in KNOWN:
            raise RunError(f"the network uses {node.target}, an operator that torch itself has not")


@contextmanager
def quiet() -> Generator[None]:
    """Without what torch's exporters say of themselves; errors are raised all the same."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        said = StringIO()
        with warnings.catch_warnings(), redirect_stdout(said), redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def find_root_cause(error: BaseException) -> str:
    """The first line of what lies behind an error, which exporters wrap in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
