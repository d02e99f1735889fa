"""Write and run ONNX files that only use standard operators, for onnxruntime or TensorRT."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from unet3d.errors import RunError
from unet3d.export.program import INPUT, OUTPUT, find_root_cause, suppress_output

REQUIRED_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 18
"""The native opset of torch's exporter; others need a conversion."""


def write_onnx(program: ExportedProgram, path: Path, metadata: Mapping[str, Any]) -> str:
    """Write an ONNX file and return its format and version.

    The metadata becomes model properties, each as JSON. Weights over 1.5 GiB go to `<name>.data`.
    """
    with suppress_output():
        try:
            exported = torch.onnx.export(
                program,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=({0: "batch"},),
                opset_version=OPSET,
                verbose=False,
            )
        except Exception as error:
            raise RunError(
                f"torch {torch.__version__} with onnxscript {version('onnxscript')} cannot convert "
                f"this network to ONNX: {find_root_cause(error)}"
            ) from error
    assert exported is not None
    model = exported.model
    graph = model.graph
    values = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    for part in (graph, *graph, *values, *(value for node in graph for value in node.outputs)):
        part.metadata_props.clear()  # torch's notes on the Python source, which have local paths
    model.producer_name, model.producer_version = "unet3d", str(metadata["unet3d"])
    model.metadata_props.update({key: json.dumps(value) for key, value in metadata.items()})
    with suppress_output():
        exported.save(path)
    return f"ONNX opset {OPSET}"


class OnnxSession:
    """An ONNX file, run by onnxruntime on the CPU."""

    def __init__(self, path: Path):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self.session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        except Exception as error:
            raise RunError(
                f"onnxruntime {version('onnxruntime')} cannot load {path.name}: "
                f"{find_root_cause(error)}"
            ) from error

    def __call__(self, batch: Tensor) -> Tensor:
        """(B, C, D, H, W) -> logits (B, K, D, H, W)."""
        (logits,) = self.session.run([OUTPUT], {INPUT: np.ascontiguousarray(batch.numpy())})
        return torch.from_numpy(np.asarray(logits))
