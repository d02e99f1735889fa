"""Export networks as a bundle: with weights, preprocessing, postprocessing and a model card."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from unet3d.export.bundle import get_network_path, write_description, write_weights
from unet3d.export.onnx_format import OnnxSession, write_onnx
from unet3d.export.torch_export_format import ExportedSession, write_torch_export
from unet3d.files import read_json
from unet3d.inference.accumulate import Network
from unet3d.report.model_card import make_model_card
from unet3d.workflows.export.trained_network import TrainedNetwork


def write_bundle(
    networks: Sequence[TrainedNetwork],
    folder: Path,
    *,
    pipeline: Mapping[str, Any],
    trace: Callable[[TrainedNetwork], ExportedProgram],
) -> str:
    """Write a bundle into a new folder, and say what it is."""
    (folder / "models").mkdir(parents=True)
    for number, trained in enumerate(networks):
        program = trace(trained)
        write_weights(
            trained.network.state_dict(), get_network_path(folder, number, ".safetensors")
        )
        write_onnx(program, get_network_path(folder, number, ".onnx"), pipeline)
        write_torch_export(program, get_network_path(folder, number, ".pt2"), pipeline)
    card = make_model_card(
        pipeline,
        [trained.metadata for trained in networks],
        [read_report(trained.path) for trained in networks],
    )
    write_description(folder, pipeline, [trained.metadata for trained in networks], card)
    return f"MONAI bundle of {len(networks)} network{'s' if len(networks) > 1 else ''}"


def read_report(checkpoint: Path) -> Mapping[str, Any] | None:
    """Return the report of the run that a checkpoint is of, if there is one."""
    try:
        report = read_json(checkpoint.parent.parent / "report.json")
    except (OSError, ValueError):
        return None
    return report if isinstance(report, Mapping) else None


def open_bundle(folder: Path, number: int) -> list[Network]:
    """Return a network of a bundle in each runtime."""
    return [
        OnnxSession(get_network_path(folder, number, ".onnx")),
        ExportedSession(get_network_path(folder, number, ".pt2")),
    ]
