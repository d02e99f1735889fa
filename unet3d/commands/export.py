"""`unet3d export checkpoint=... output=net.onnx`: export a network for other programs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from unet3d import __version__
from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import one_of, read_settings
from unet3d.data.dataset import get_region_labels
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import RunError, UsageError
from unet3d.export import bundle as bundle_format
from unet3d.export import onnx_format
from unet3d.export.bundle import get_network_path
from unet3d.export.parity import TOLERANCE, Parity, compare_outputs, load_sample_patches
from unet3d.export.program import (
    ExportedSession,
    export_program,
    require_packages,
    to_plain_operators,
    write_torch_export,
)
from unet3d.files import name_file, read_report, shorten_name
from unet3d.inference.accumulate import Network
from unet3d.inference.ensemble import (
    TrainedNetwork,
    find_common_mirroring_axes,
    find_largest_component_classes,
    load_members,
)
from unet3d.inference.networks import get_inference_fn, measure_window_memory
from unet3d.inference.write_labels import choose_decision
from unet3d.machine import Precision
from unet3d.nnunet import model_folder as nnunet_folder
from unet3d.report.page import make_model_card
from unet3d.text import MIB
from unet3d.types import Triple

ENDINGS = {"onnx": ".onnx", "torch_export": ".pt2", "nnunet": "", "bundle": ""}
"""The ending of a file in each format; without one, a folder."""


REQUIRED_PACKAGES = {
    "onnx": onnx_format.REQUIRED_PACKAGES,
    "torch_export": (),
    "nnunet": ("dynamic_network_architectures",),
    "bundle": ("safetensors", *onnx_format.REQUIRED_PACKAGES),
}
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Which checkpoint to export, and how."""

    checkpoints: Annotated[tuple[Path, ...], "checkpoint"]
    output: Path
    format: Annotated[str, one_of(tuple(ENDINGS))]
    patch_size: Triple | None  # None: as in training
    input: Path | None  # scans to compare on
    allow_targets: tuple[str, ...]

    def __post_init__(self):
        if self.output.suffix != ENDINGS[self.format]:
            others = [f"{k} writes {ending or 'a folder'}" for k, ending in ENDINGS.items()]
            raise UsageError(
                f"output={self.output} does not fit format={self.format}: "
                f"{', '.join(others)}, which has no ending"
            )


def main(composed: ComposedConfig, folder: Path) -> int:
    """Write the file, and say how well it agrees with the checkpoint."""
    print(export(**vars(read_settings(ExportConfig, composed.config))))
    return 0


def export(
    checkpoints: Sequence[Path],
    output: Path,
    *,
    format: str,
    patch_size: Triple | None = None,
    input: Path | None = None,
    allow_targets: Sequence[str] = (),
) -> str:
    """Write the file, keep it only if its outputs are the network's, and say how they agree.

    They are compared on patches of the scans of `input`, by default of the training dataset.
    """
    check_output(output)
    require_packages(f"the format {format}", REQUIRED_PACKAGES[format])
    networks = load_members(checkpoints, allow_targets)
    if patch_size is not None:
        networks = [replace(trained, patch_size=patch_size) for trained in networks]
    if len(networks) > 1 and format != "bundle":
        raise UsageError(
            f"checkpoint names {len(networks)} checkpoints, and a file holds one network: use "
            "format=bundle, or export each and average their logits, as predict does"
        )
    forwards = [get_inference_fn(t.network, Precision("32", "32"), CPU) for t in networks]
    for forward, trained in zip(forwards, networks, strict=True):
        shape = (1, len(trained.channels), *trained.patch_size)
        measure_window_memory([forward], shape, CPU)  # refuses such patches
    first = networks[0]
    patches, source = load_sample_patches(input, first.metadata, first.patch_size, allow_targets)
    prefix = f".{shorten_name(output.name, 240)}-"
    with TemporaryDirectory(prefix=prefix, dir=output.parent) as folder, name_file(output):
        draft = Path(folder) / output.name
        kind = write(format, networks, draft)
        parity = verify_export(format, draft, forwards, first, patches, source)
        drafts = sorted(Path(folder).iterdir(), reverse=True)  # files of external weights first
        files = [file.replace(output.with_name(file.name)) for file in drafts]
    return describe_export(files[::-1], kind, first, f"on {source} {parity}")


def check_output(output: Path) -> None:
    """Refuse what cannot become the file, or the folder, before anything is computed."""
    if output.is_dir() and output.suffix:
        raise UsageError(f"{output} is a folder: name a file in it")
    if output.exists() and not output.suffix:
        raise UsageError(f"{output} exists: name a new folder")
    if not output.parent.is_dir():
        raise UsageError(f"{output}: the folder {output.parent.absolute()} does not exist")


def write(format: str, networks: Sequence[TrainedNetwork], path: Path) -> str:
    """Write networks in a format, and say what it is."""
    if format == "nnunet":
        return nnunet_folder.write_model_folder(networks[0], path)
    pipeline = describe_pipeline(networks)
    if format == "onnx":
        return onnx_format.write_onnx(trace(networks[0]), path, pipeline)
    if format == "torch_export":
        return write_torch_export(trace(networks[0]), path, pipeline)
    (path / "models").mkdir(parents=True)
    for number, trained in enumerate(networks):
        weights, program = trained.network.state_dict(), trace(trained)
        bundle_format.write_weights(weights, get_network_path(path, number, ".safetensors"))
        onnx_format.write_onnx(program, get_network_path(path, number, ".onnx"), pipeline)
        write_torch_export(program, get_network_path(path, number, ".pt2"), pipeline)
    members = [trained.metadata for trained in networks]
    reports = [read_report(trained.path.parent.parent) or None for trained in networks]
    card = make_model_card(pipeline, members, reports)
    bundle_format.write_description(path, pipeline, members, card)
    return f"MONAI bundle of {len(networks)} network{'s' if len(networks) > 1 else ''}"


def open_sessions(format: str, path: Path, number: int) -> list[Network]:
    """Return a network of what was written, in every runtime."""
    if format == "nnunet":
        return [nnunet_folder.NnUnetSession(path)]
    sessions = {".onnx": onnx_format.OnnxSession, ".pt2": ExportedSession}
    if format == "bundle":
        return [run(get_network_path(path, number, end)) for end, run in sessions.items()]
    return [sessions[path.suffix](path)]


def trace(trained: TrainedNetwork) -> ExportedProgram:
    """Return the network's graph of plain operators."""
    network = to_plain_operators(trained.network)
    return export_program(network, len(trained.channels), trained.patch_size)


def describe_pipeline(networks: Sequence[TrainedNetwork]) -> dict[str, Any]:
    """Return what is needed to segment with networks that predict together, as plain values."""
    first, members = networks[0], [trained.metadata for trained in networks]
    metadata, regions = first.metadata, first.metadata.get("regions")
    preprocessing = Preprocessing.from_dict(metadata["preprocessing"])
    spacing, intensities = preprocessing.spacing_mm, preprocessing.intensities
    classes = list(metadata["classes"])
    keys = ("mean", "deviation", "percentile_0_5", "percentile_99_5")
    return {
        "unet3d": __version__,
        "channels": first.channels,
        "patch_size": list(first.patch_size),
        "orientation": preprocessing.orientation,
        "spacing_mm": None if spacing is None else list(spacing),
        "background": list(preprocessing.background),
        "crop": preprocessing.crop,
        "normalize": first.normalizations,
        "intensities": intensities and [dict(zip(keys, i, strict=True)) for i in intensities],
        "classes": classes,
        "outputs": first.outputs,
        "activation": "softmax" if regions is None else "sigmoid",
        "regions": regions,
        "labels": list(range(len(classes)))
        if regions is None
        else get_region_labels(regions, metadata.get("region_labels")),
        "keep_largest_component": list(find_largest_component_classes(members)),
        "mirroring_axes": find_common_mirroring_axes(members),
        "trained_precision": str(metadata["config"]["precision"]),
    }


def verify_export(
    format: str,
    draft: Path,
    forwards: Sequence[Network],
    trained: TrainedNetwork,
    patches: list[Tensor],
    source: str,
) -> Parity:
    """Compare the file's outputs with those of the checkpoint's network, as predict runs it.

    Return the largest difference of all networks in all runtimes.
    """
    decide = choose_decision(trained.metadata.get("regions"), trained.metadata.get("region_labels"))
    batches = [torch.stack(patches[:1]), torch.stack(patches[1:])]  # it has to take any size
    try:
        found = [
            compare_outputs(forward, session, batches, decide)
            for number, forward in enumerate(forwards)
            for session in open_sessions(format, draft, number)
        ]
    except (RunError, MemoryError):
        raise
    except Exception as error:
        raise RunError(
            f"the exported network fails where the checkpoint's does not: {error}"
        ) from error
    parity = next((p for p in found if not p.passed), max(found, key=lambda p: p.max_difference))
    if not parity.passed:
        raise RunError(
            "the exported network does not match the checkpoint; the file was removed: on "
            f"{source} {parity}; rounding explains {TOLERANCE:.0e} of the largest "
            "logit at most"
        )
    return parity


def describe_export(files: Sequence[Path], kind: str, trained: TrainedNetwork, parity: str) -> str:
    """Say in one line what was written."""
    shape = f"(batch, {{}}, {', '.join(map(str, trained.patch_size))})"
    inputs, outputs = shape.format(len(trained.channels)), shape.format(len(trained.outputs))
    names = []
    for file in files:
        parts = [part for part in (file, *file.rglob("*")) if part.is_file()]
        names.append(f"{file} ({sum(part.stat().st_size for part in parts) / MIB:.1f} MiB)")
    precision = str(trained.metadata["config"]["precision"])
    cast = "" if precision == "32" else f" in float32 (trained with precision={precision})"
    return f"{' and '.join(names)}, {kind}, {inputs} -> {outputs}{cast}; {parity}"
