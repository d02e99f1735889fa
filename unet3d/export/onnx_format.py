"""ONNX: operators of the standard alone, so that onnxruntime runs it as well as TensorRT."""

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
from unet3d.export.program import INPUT, OUTPUT, find_root_cause, quiet

ENDING = ".onnx"
NEEDS = ("onnx", "onnxscript", "onnxruntime")
OPSET = 18
"""What torch's exporter speaks by itself; others it translates to."""

MOST_INSIDE = 2**31 - 2**26
"""Bytes of weights that one file may hold: a protobuf message ends at 2 GiB."""

LEAST_BESIDE = 1024
"""Bytes of a tensor that goes into the file beside, if there has to be one."""


def write_onnx(program: ExportedProgram, path: Path, facts: Mapping[str, Any]) -> str:
    """Write one file, or beside it `<name>.data` with weights of 2 GiB and more; say what it is.

    The facts are in the model's metadata, each as JSON.
    """
    import onnx

    with quiet():
        try:
            made = torch.onnx.export(
                program,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=({0: "batch"},),
                opset_version=OPSET,
                verbose=False,
            )
        except Exception as error:
            raise RunError(
                f"torch {torch.__version__} with onnxscript {version('onnxscript')} cannot say "
                f"this network in ONNX: {find_root_cause(error)}"
            ) from error
    assert made is not None
    model = made.model_proto
    foreign = {f"{node.domain}.{node.op_type}" for node in model.graph.node if node.domain}
    if foreign:
        raise RunError(f"ONNX itself has no {', '.join(sorted(foreign))}, which the network uses")
    strip_metadata(model)
    model.producer_name, model.producer_version = "unet3d", str(facts["unet3d"])
    onnx.helper.set_model_props(model, {key: json.dumps(fact) for key, fact in facts.items()})
    weights = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    onnx.save_model(
        model,
        path,
        save_as_external_data=weights > MOST_INSIDE,
        location=f"{path.name}.data",
        size_threshold=LEAST_BESIDE,
    )
    return f"ONNX opset {OPSET}"


def strip_metadata(model: Any) -> None:
    """Without what torch notes of the Python that a node comes from, paths among it."""
    graph = model.graph
    parts = (graph.node, graph.input, graph.output, graph.value_info, graph.initializer, [graph])
    for part in (part for several in parts for part in several):
        del part.metadata_props[:]


class OnnxSession:
    """A file as onnxruntime runs it on the CPU."""

    def __init__(self, path: Path):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self.session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        except Exception as error:
            raise RunError(
                f"onnxruntime {version('onnxruntime')} cannot load {path.name}: {find_root_cause(error)}"
            ) from error

    def __call__(self, batch: Tensor) -> Tensor:
        """(B, C, D, H, W) -> logits (B, K, D, H, W)."""
        (logits,) = self.session.run([OUTPUT], {INPUT: np.ascontiguousarray(batch.numpy())})
        return torch.from_numpy(np.asarray(logits))
