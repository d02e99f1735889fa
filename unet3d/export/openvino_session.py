"""Run a network's graph with OpenVINO on the CPU."""

import sys
from functools import cache
from importlib.metadata import version
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from unet3d.errors import RunError
from unet3d.export.program import find_root_cause, suppress_output

REQUIRED_PACKAGES = ("openvino",)


@cache
def get_core() -> Any:
    """Return the process's only Core.

    Each one sets a stack for signal handlers, and frees it when it is destroyed: where two of them
    are destroyed in the order of their creation, the next signal ends the process (OpenVINO
    2026.4).
    """
    import openvino

    return openvino.Core()


class OpenVinoSession:
    """A graph that OpenVINO has compiled for this CPU; it takes any batch size."""

    def __init__(self, program: ExportedProgram, *, dtype: torch.dtype = torch.float32):
        # Or openvino would fork this process, each time, to report its use to its makers.
        sys.modules.setdefault("openvino_telemetry", cast(Any, None))
        with suppress_output():  # absl, which it imports, would keep the stream, and close it
            import openvino

        # Left alone, OpenVINO computes in bf16 where the CPU can.
        options = {
            "INFERENCE_PRECISION_HINT": "bf16" if dtype == torch.bfloat16 else "f32",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
        }
        try:
            with suppress_output():
                model = openvino.convert_model(program)
                self.model: Any = get_core().compile_model(model, "CPU", options)
        except Exception as error:
            raise RunError(
                f"openvino {version('openvino')} cannot run this network: {find_root_cause(error)}"
            ) from error

    def __call__(self, batch: Tensor) -> Tensor:
        """(B, C, D, H, W) -> logits (B, K, D, H, W)."""
        logits = self.model([np.ascontiguousarray(batch.numpy())])[0]
        return torch.from_numpy(np.asarray(logits))
