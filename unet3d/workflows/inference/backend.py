"""Run networks with torch, ONNX Runtime or OpenVINO."""

from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from unet3d import __version__
from unet3d.errors import UsageError
from unet3d.export import onnx_format, openvino_session
from unet3d.export.plain_operators import to_plain_operators
from unet3d.export.program import export_program, require_packages
from unet3d.inference.accumulate import Network
from unet3d.machine import Precision
from unet3d.memory.autocast import AUTOCAST_TYPES
from unet3d.model.half_precision import cast_to_half
from unet3d.types import Triple
from unet3d.workflows.memory.training_step import TRUE_HALF_TYPES


def resolve_backend_precision(backend: str, device: str, precision: Precision) -> Precision:
    """Return the precision in which a backend computes; refuse a backend for another device."""
    if backend == "torch":
        return precision
    if device != "cpu":
        raise UsageError(f"backend={backend} computes on the CPU: add device=cpu")
    if backend == "onnx":
        require_packages("backend=onnx", onnx_format.REQUIRED_PACKAGES)
    else:
        require_packages("backend=openvino", openvino_session.REQUIRED_PACKAGES)
    is_mixed = precision.used == "bf16" and backend == "openvino"
    if precision.used == "32" or is_mixed:
        return precision
    return Precision(precision.requested, "32", f"backend={backend} computes in float32")


def open_network(
    network: nn.Module,
    backend: str,
    precision: Precision,
    device: torch.device,
    *,
    channels: int,
    patch: Triple,
) -> Network:
    """Return a function from windows to logits, computed by the backend."""
    if backend == "torch":
        return get_inference_fn(network, precision, device)
    program = export_program(to_plain_operators(network), channels, patch)
    if backend == "openvino":
        dtype = torch.bfloat16 if precision.used == "bf16" else torch.float32
        return openvino_session.OpenVinoSession(program, dtype=dtype)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        onnx_format.write_onnx(program, path, {"unet3d": __version__})
        return onnx_format.OnnxSession(path)


def get_inference_fn(network: nn.Module, precision: Precision, device: torch.device) -> Network:
    """Move a network to its device and precision; return its forward without gradients."""
    dtype = TRUE_HALF_TYPES.get(precision.used, torch.float32)
    if dtype != torch.float32:
        cast_to_half(network, dtype)
    network.to(device)

    def forward(batch: Tensor) -> Tensor:
        mixed = AUTOCAST_TYPES.get(precision.used)
        autocast = nullcontext() if mixed is None else torch.autocast(device.type, dtype=mixed)
        with torch.inference_mode(), autocast:
            return network(batch.to(dtype))

    return forward
