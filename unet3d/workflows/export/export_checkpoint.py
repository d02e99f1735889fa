"""Export a checkpoint's network to a file, and verify that the file gives the same outputs."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.export import ExportedProgram

from unet3d import __version__
from unet3d.config.settings.export import ExportSettings
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import RunError, UsageError
from unet3d.export import bundle as bundle_format
from unet3d.export import onnx_format, torch_export_format
from unet3d.export.parity import TOLERANCE, Parity, compare_outputs
from unet3d.export.plain_operators import to_plain_operators
from unet3d.export.program import export_program, require_packages
from unet3d.files import atomic_write, name_file, shorten_name
from unet3d.inference.accumulate import Network
from unet3d.inference.regions import get_region_labels
from unet3d.inference.write_labels import choose_decision
from unet3d.machine.device import Precision
from unet3d.units import MIB
from unet3d.workflows.export import bundle, nnunet_folder
from unet3d.workflows.export.sample_patches import SamplePatches, load_sample_patches
from unet3d.workflows.export.trained_network import (
    TrainedNetwork,
    list_normalizations,
    load_trained,
)
from unet3d.workflows.inference.backend import get_inference_fn
from unet3d.workflows.inference.ensemble import (
    find_common_mirroring_axes,
    find_largest_component_classes,
)
from unet3d.workflows.inference.window_memory import measure_window_memory


@dataclass(frozen=True)
class ExportFormat:
    """How a format is written and run."""

    packages: tuple[str, ...]  # that it needs
    write: Callable[[Sequence[TrainedNetwork], Path], str]  # returns what it is
    open_sessions: Callable[[Path, int], list[Network]]  # a network in every runtime, by number
    holds_several: bool = False  # networks


def write_onnx(networks: Sequence[TrainedNetwork], path: Path) -> str:
    """Write an ONNX file."""
    trained = networks[0]
    return onnx_format.write_onnx(trace(trained), path, make_export_metadata(trained))


def write_torch_export(networks: Sequence[TrainedNetwork], path: Path) -> str:
    """Write a file of torch.export."""
    trained = networks[0]
    return torch_export_format.write_torch_export(
        trace(trained), path, make_export_metadata(trained)
    )


def write_bundle(networks: Sequence[TrainedNetwork], path: Path) -> str:
    """Write the folder of a bundle."""
    members = [trained.metadata for trained in networks]
    pipeline = make_export_metadata(networks[0]) | {
        "keep_largest_component": list(find_largest_component_classes(members)),
        "mirroring_axes": find_common_mirroring_axes(members),
    }
    return bundle.write_bundle(networks, path, pipeline=pipeline, trace=trace)


FORMATS = {
    "onnx": ExportFormat(
        onnx_format.REQUIRED_PACKAGES,
        write_onnx,
        lambda path, _: [onnx_format.OnnxSession(path)],
    ),
    "torch_export": ExportFormat(
        torch_export_format.REQUIRED_PACKAGES,
        write_torch_export,
        lambda path, _: [torch_export_format.ExportedSession(path)],
    ),
    "nnunet": ExportFormat(
        nnunet_folder.REQUIRED_PACKAGES,
        lambda networks, path: nnunet_folder.write_model_folder(networks[0], path),
        lambda path, _: [nnunet_folder.NnUnetSession(path)],
    ),
    "bundle": ExportFormat(
        bundle_format.REQUIRED_PACKAGES,
        write_bundle,
        bundle.open_bundle,
        holds_several=True,
    ),
}

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The files, and how well their outputs agree."""

    files: list[Path]
    kind: str
    trained: TrainedNetwork
    parity: Parity
    patches: SamplePatches

    def __str__(self) -> str:
        shape = f"(batch, {{}}, {', '.join(map(str, self.trained.patch_size))})"
        inputs = shape.format(len(self.trained.channels))
        outputs = shape.format(len(self.trained.outputs))
        files = " and ".join(f"{f} ({get_size(f) / MIB:.1f} MiB)" for f in self.files)
        precision = str(self.trained.metadata["config"]["precision"])
        cast = "" if precision == "32" else f" in float32 (trained with precision={precision})"
        return (
            f"{files}, {self.kind}, {inputs} -> {outputs}{cast}; "
            f"on {self.patches.description} {self.parity}"
        )


def export(settings: ExportSettings) -> ExportResult:
    """Write the file, and keep it only if its outputs are the network's."""
    format, output = FORMATS[settings.format], settings.output
    check_output(output)
    require_packages(f"the format {settings.format}", format.packages)
    with temporary_output(output) as draft:
        networks = load_trained(settings)
        if len(networks) > 1 and not format.holds_several:
            raise UsageError(
                f"checkpoint names {len(networks)} checkpoints, and a file holds one network: use "
                "format=bundle, or export each and average their logits, as predict does"
            )
        forwards = [get_inference_fn(t.network, Precision("32", "32"), CPU) for t in networks]
        for forward, trained in zip(forwards, networks, strict=True):
            check_patch(forward, trained)
        first = networks[0]
        patches = load_sample_patches(
            settings.input, first.metadata, first.patch_size, settings.allow_targets
        )
        kind = format.write(networks, draft)
        parity = verify_export(draft, format, forwards, first, patches)
        files = commit_output(draft, output)
    return ExportResult(files=files, kind=kind, trained=first, parity=parity, patches=patches)


def get_size(path: Path) -> int:
    """Return the bytes of a file, or of the files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def check_output(output: Path) -> None:
    """Refuse what cannot become the file, or the folder, before anything is computed."""
    if output.is_dir() and output.suffix:
        raise UsageError(f"{output} is a folder: name a file in it")
    if output.exists() and not output.suffix:
        raise UsageError(f"{output} exists: name a new folder")
    if not output.parent.is_dir():
        raise UsageError(f"{output}: the folder {output.parent.absolute()} does not exist")


@contextmanager
def temporary_output(output: Path) -> Generator[Path]:
    """Yield a path in a temporary folder beside the output."""
    try:
        folder = TemporaryDirectory(prefix=f".{shorten_name(output.name, 240)}-", dir=output.parent)
    except OSError as error:
        where = output.parent.absolute()
        raise UsageError(f"{output}: cannot write to {where}: {error.strerror}") from error
    with folder as name, name_file(output):
        yield Path(name) / output.name


def commit_output(draft: Path, output: Path) -> list[Path]:
    """Move the draft, and before it files of external weights, to the output's folder."""
    if draft.is_dir():
        return [draft.rename(output)]
    files = sorted(draft.parent.iterdir(), reverse=True)
    for file in files:
        with atomic_write(output.with_name(file.name)) as target:
            file.replace(target)
    return [output.with_name(file.name) for file in reversed(files)]


def check_patch(forward: Network, trained: TrainedNetwork) -> None:
    """Refuse a patch that the network cannot take, and outputs that are not its classes."""
    shape = (1, len(trained.channels), *trained.patch_size)
    num_outputs, _ = measure_window_memory([forward], [trained.network], shape, CPU)
    if num_outputs != len(trained.outputs):
        raise UsageError(
            f"the network has {num_outputs} outputs for {len(trained.outputs)} classes: "
            f"{', '.join(trained.outputs)}"
        )


def trace(trained: TrainedNetwork) -> ExportedProgram:
    """Return the network's graph of plain operators."""
    network = to_plain_operators(trained.network)
    return export_program(network, len(trained.channels), trained.patch_size)


def make_export_metadata(trained: TrainedNetwork) -> dict[str, Any]:
    """Return what is needed to run the file, as plain values."""
    metadata, regions = trained.metadata, trained.metadata.get("regions")
    preprocessing = Preprocessing.from_dict(metadata["preprocessing"])
    classes, spacing, intensities = (
        list(metadata["classes"]),
        preprocessing.spacing_mm,
        preprocessing.intensities,
    )
    keys = ("mean", "deviation", "percentile_0_5", "percentile_99_5")
    return {
        "unet3d": __version__,
        "channels": trained.channels,
        "patch_size": list(trained.patch_size),
        "orientation": preprocessing.orientation,
        "spacing_mm": None if spacing is None else list(spacing),
        "background": list(preprocessing.background),
        "crop": preprocessing.crop,
        "normalize": list_normalizations(preprocessing, len(trained.channels)),
        "intensities": intensities and [dict(zip(keys, i, strict=True)) for i in intensities],
        "classes": classes,
        "outputs": trained.outputs,
        "activation": "softmax" if regions is None else "sigmoid",
        "regions": regions,
        "labels": list(range(len(classes)))
        if regions is None
        else get_region_labels(regions, metadata.get("region_labels")),
        "keep_largest_component": list(metadata.get("keep_largest_component") or ()),
        "mirroring_axes": find_common_mirroring_axes([metadata]),
        "trained_precision": str(metadata["config"]["precision"]),
    }


def verify_export(
    draft: Path,
    format: ExportFormat,
    forwards: Sequence[Network],
    trained: TrainedNetwork,
    patches: SamplePatches,
) -> Parity:
    """Compare the file's outputs with those of the checkpoint's network, as predict runs it.

    Return the largest difference of all networks in all runtimes.
    """
    decide = choose_decision(trained.metadata.get("regions"), trained.metadata.get("region_labels"))
    try:
        found = [
            compare_outputs(forward, session, patches.batches(), decide)
            for number, forward in enumerate(forwards)
            for session in format.open_sessions(draft, number)
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
            f"{patches.description} {parity}; rounding explains {TOLERANCE:.0e} of the largest "
            "logit at most"
        )
    return parity
