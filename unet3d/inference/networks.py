"""Run networks with torch, ONNX Runtime or OpenVINO, and measure what their windows take."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from unet3d import __version__
from unet3d.cuda_graphs import CudaGraphs
from unet3d.errors import DoesNotFitError, UsageError, is_out_of_memory, summarize_error
from unet3d.export import formats
from unet3d.inference.heads import Network
from unet3d.machine import (
    AUTOCAST_TYPES,
    TRUE_HALF_TYPES,
    Precision,
    resolve_device,
    resolve_precision,
)
from unet3d.model.weights import cast_to_half
from unet3d.peak_memory import PeakMeter

log = logging.getLogger(__name__)


def resolve_computation(
    device: str, precision: str | None, backend: str, trained_precision: str
) -> tuple[torch.device, Precision]:
    """Return the device and the precision to predict in; None is the precision of training."""
    kind = resolve_device(device, "device")
    if kind == "mps":
        raise UsageError("device=mps is for training only: use device=cpu")
    if precision is None and trained_precision == "16-true" and kind == "cpu":
        used = Precision("16-true", "32", "a CPU does not compute in pure fp16")
    else:
        used = resolve_precision(trained_precision if precision is None else precision, kind)
    if backend != "torch":
        if kind != "cpu":
            raise UsageError(f"backend={backend} computes on the CPU: add device=cpu")
        formats.require_packages(f"backend={backend}", formats.REQUIRED_PACKAGES[backend])
        if used.used != "32" and (backend, used.used) != ("openvino", "bf16"):
            used = Precision(used.requested, "32", f"backend={backend} computes in float32")
    return torch.device(device if ":" in device else kind), used


def open_network(
    network: nn.Module,
    backend: str,
    precision: Precision,
    device: torch.device,
    *,
    shape: Sequence[int],
) -> Network:
    """Return a function from windows (B, C, D, H, W) to logits, computed by the backend."""
    if backend == "torch":
        return get_inference_fn(network, precision, device)
    program = formats.export_program(formats.to_plain_operators(network), shape[1:])
    if backend == "openvino":
        return formats.OpenVinoSession(program, "bf16" if precision.used == "bf16" else "f32")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        formats.write_onnx(program, path, {"unet3d": __version__})
        return formats.load_onnx(path)


def get_inference_fn(network: nn.Module, precision: Precision, device: torch.device) -> Network:
    """Move a network to its device and precision; return its forward without gradients."""
    dtype = TRUE_HALF_TYPES.get(precision.used, torch.float32)
    if dtype != torch.float32:
        cast_to_half(network, dtype)
    network.to(device)
    mixed = AUTOCAST_TYPES.get(precision.used)

    return partial(_infer, network, dtype, device.type, mixed)


def _infer(
    network: nn.Module,
    dtype: torch.dtype,
    device_type: str,
    mixed: torch.dtype | None,
    batch: Tensor,
) -> Tensor:
    autocast = torch.autocast(device_type, mixed, enabled=mixed is not None)
    with torch.inference_mode(), autocast:
        return network(batch.to(dtype))


class ReplayedNetwork:
    """A network whose forward of a batch of windows (B, C, D, H, W) is replayed as a CUDA graph.

    The next call overwrites the logits. A smaller batch is computed as a part of a whole one.
    """

    def __init__(self, network: Network, windows: Tensor, graphs: CudaGraphs):
        self.windows = windows
        self.graph = graphs.record(lambda: network(windows))

    def __call__(self, batch: Tensor) -> Tensor:
        self.windows[: len(batch)] = batch
        self.graph.replay()
        return self.graph.tensors[: len(batch)]


def record_networks(
    networks: Sequence[Network], shape: Sequence[int], device: torch.device
) -> list[Network]:
    """Return networks that have run once, on a GPU as CUDA graphs for this shape if possible."""
    if device.type != "cuda":
        return list(networks)
    graphs, windows = CudaGraphs(device), torch.zeros(tuple(shape), device=device)
    try:
        return [ReplayedNetwork(network, windows, graphs) for network in networks]
    except RuntimeError as error:
        log.warning("windows run without CUDA graphs: %s", summarize_error(error))
        return list(networks)


def measure_window_memory(
    networks: Sequence[Network], shape: Sequence[int], device: torch.device
) -> tuple[int, int]:
    """Return the number of outputs, and the peak bytes of a batch of windows (B, C, D, H, W).

    Where a process cannot read its own peak, the outputs of all modules are added up instead.
    """
    output_bytes = 0

    def count(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal output_bytes
        output_bytes += output.nbytes if isinstance(output, Tensor) else 0

    hook = register_module_forward_hook(count)  # one of a module would disable fused blocks
    meter, num_outputs = PeakMeter(), 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
    meter.start(device)
    before = meter.read(device)
    try:
        batch = torch.zeros(tuple(shape)).to(device)
        for network in networks:
            num_outputs = network(batch.flip([])).shape[1]
    except (UsageError, DoesNotFitError):
        raise
    except Exception as error:
        size = "x".join(map(str, shape[2:]))
        if is_out_of_memory(error):
            memory = "GPU" if device.type == "cuda" else "RAM"
            raise DoesNotFitError(
                f"{shape[0]} windows of {size} do not fit in the {memory}: try batch_size=1, "
                "precision=bf16 or device=cpu"
            ) from error
        raise UsageError(
            f"the network cannot take patches of {size}: {summarize_error(error)}"
        ) from error
    finally:
        hook.remove()
    after = meter.read(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return num_outputs, (after.reserved or 0) - (before.reserved or 0)
    if after.resident is None or before.resident is None:
        return num_outputs, output_bytes
    return num_outputs, after.resident - before.resident
