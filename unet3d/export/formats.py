"""Trace a network as a graph of plain operators; write and run it as ONNX, .pt2 or OpenVINO."""

import json
import logging
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import cache
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram

from unet3d.errors import RunError, explain_missing_packages, summarize_error
from unet3d.types import HasRetention

REQUIRED_PACKAGES = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("openvino",),
    "torch_export": (),
    "nnunet": ("dynamic_network_architectures",),
    "bundle": ("safetensors", "onnx", "onnxscript", "onnxruntime"),
}
"""What formats and runtimes need besides this package's own requirements."""

INPUT, OUTPUT = "image", "logits"
METADATA_FILE = "unet3d.json"

STANDARD_NAMESPACES = ("aten", "prim", "prims")
"""Namespaces of the operators that every torch has and ONNX can express."""

OPSET = 18
"""The native opset of torch's exporter; others need a conversion."""


def to_plain_operators(network: nn.Module) -> nn.Module:
    """Return the network in plain modules; its weights are shared, not copied."""
    weights = [*network.parameters(), *network.buffers()]
    copy = deepcopy(network, {id(weight): weight for weight in weights})
    if isinstance(copy, HasRetention):
        copy.retention = None
    return copy


def export_program(network: nn.Module, shape: Sequence[int]) -> ExportedProgram:
    """Return the graph of (batch, C, D, H, W) -> (batch, K, D, H, W), for any batch size.

    The `shape` (C, D, H, W) is fixed to the patch: sliding windows have no other size, networks pad
    odd sizes accordingly, and runtimes plan their memory for it.
    """
    example = torch.zeros(2, *shape)  # a batch of 1 would be specialized
    dynamic = ({0: Dim("batch", min=1)},)
    with explain_failure(f"{type(network).__name__} cannot be traced by torch.export"):
        program = torch.export.export(network, (example,), dynamic_shapes=dynamic)
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
    """Write a .pt2 file, with the metadata as a file in it; return its format and version."""
    with suppress_output():
        extra = {METADATA_FILE: json.dumps(metadata, indent=1)}
        torch.export.save(program, path, extra_files=extra)
    return f"torch.export of torch {torch.__version__}"


def write_onnx(program: ExportedProgram, path: Path, metadata: Mapping[str, Any]) -> str:
    """Write an ONNX file of standard operators and return its format and version.

    The metadata becomes model properties, each as JSON. Weights over 1.5 GiB go to `<name>.data`.
    """
    versions = f"torch {torch.__version__} with onnxscript {version('onnxscript')}"
    with explain_failure(f"{versions} cannot convert this network to ONNX"):
        exported = torch.onnx.export(
            program,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: "batch"},),
            opset_version=OPSET,
            verbose=False,
        )
    assert exported is not None
    model, graph = exported.model, exported.model.graph
    values = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    for part in (graph, *graph, *values, *(value for node in graph for value in node.outputs)):
        part.metadata_props.clear()  # torch's notes on the Python source, which have local paths
    model.producer_name, model.producer_version = "unet3d", str(metadata["unet3d"])
    model.metadata_props.update({key: json.dumps(value) for key, value in metadata.items()})
    with suppress_output():
        exported.save(path)
    return f"ONNX opset {OPSET}"


def load_torch_export(path: Path) -> Callable[[Tensor], Tensor]:
    """Load a .pt2 file for torch, on the CPU: (B, C, D, H, W) -> logits (B, K, D, H, W)."""
    with suppress_output():
        module = torch.export.load(path).module()
    return torch.inference_mode()(lambda batch: module(batch))


def load_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    """Load an ONNX file for onnxruntime, on the CPU: (B, C, D, H, W) -> logits (B, K, D, H, W)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])

    def run(batch: Tensor) -> Tensor:
        (logits,) = session.run([OUTPUT], {INPUT: np.ascontiguousarray(batch.numpy())})
        return torch.from_numpy(np.asarray(logits))

    return run


class OpenVinoSession:
    """A graph that OpenVINO has compiled for this CPU; it takes any batch size."""

    def __init__(self, program: ExportedProgram, precision: str = "f32"):
        core = _get_openvino_core()
        import openvino

        options = {
            "INFERENCE_PRECISION_HINT": precision,  # left alone, it takes bf16 where the CPU can
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
        }
        with explain_failure(f"openvino {version('openvino')} cannot run this network"):
            model = openvino.convert_model(program)
            self.model: Any = core.compile_model(model, "CPU", options)

    def __call__(self, batch: Tensor) -> Tensor:
        """(B, C, D, H, W) -> logits (B, K, D, H, W)."""
        logits = self.model([np.ascontiguousarray(batch.numpy())])[0]
        return torch.from_numpy(np.asarray(logits))


@cache
def _get_openvino_core() -> Any:
    """Return the process's only Core.

    Each one sets a stack for signal handlers, and frees it when it is destroyed: where two of them
    are destroyed in the order of their creation, the next signal ends the process (OpenVINO
    2026.4).
    """
    # Or openvino would fork this process, each time, to report its use to its makers.
    sys.modules.setdefault("openvino_telemetry", cast(Any, None))
    with suppress_output():  # absl, which it imports, would keep the stream, and close it
        import openvino
    return openvino.Core()


def require_packages(key: str, packages: Sequence[str]) -> None:
    """Refuse what `key` asks for if one of these packages is not installed."""
    with explain_missing_packages(key, *packages), suppress_output():
        for package in packages:
            import_module(package)


@contextmanager
def suppress_output() -> Generator[None]:
    """Suppress what torch's exporters log and print; errors are still raised."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        sink, ignored = StringIO(), warnings.catch_warnings(action="ignore")
        with ignored, redirect_stdout(sink), redirect_stderr(sink):
            yield
    finally:
        logging.disable(previous_level)


@contextmanager
def explain_failure(problem: str) -> Generator[None]:
    """Raise a RunError of one line: exporters wrap the original error in pages of advice."""
    try:
        with suppress_output():
            yield
    except Exception as error:  # of many kinds
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {summarize_error(cause)}"
        raise RunError(f"{problem}: {reason}") from error
