"""From a checkpoint to a file that other programs run, and the proof that it is equal."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from omegaconf import ListConfig
from torch import nn

from unet3d import __version__
from unet3d.atomic_write import atomic_write
from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import expand_paths, get_region_labels, summarize_error
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import DoesNotFitError, RunError, UsageError
from unet3d.export import onnx_format, torch_export_format
from unet3d.export.parity import TOLERANCE, Parity, compare_outputs
from unet3d.export.program import export_program, quiet
from unet3d.inference.accumulate import Network
from unet3d.inference.write_labels import RegionsToLabels, argmax_labels
from unet3d.lit.resume import extract_weights, load_checkpoint
from unet3d.machine.device import Precision
from unet3d.pool.export_modules import replace_with_plain
from unet3d.types import HasRetentionPolicy, Triple
from unet3d.units import MIB
from unet3d.workflows.export.sample_patches import SamplePatches, load_sample_patches
from unet3d.workflows.inference.build import resolve_checkpoint
from unet3d.workflows.inference.ensemble import load_network
from unet3d.workflows.inference.model_metadata import validate_metadata
from unet3d.workflows.inference.predictor import get_inference_fn
from unet3d.workflows.inference.window_memory import measure_window_memory

FORMATS: dict[str, ModuleType] = {"onnx": onnx_format, "torch_export": torch_export_format}

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """A checkpoint's network in float32, and what is to be known of it."""

    network: nn.Module
    card: Mapping[str, Any]
    patch: Triple

    @property
    def outputs(self) -> list[str]:
        """What each channel of the logits is of."""
        return list(self.card.get("regions") or self.card["classes"])


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What was written, and how equal it is."""

    files: list[Path]
    kind: str
    trained: TrainedNetwork
    equality: Parity
    patches: SamplePatches

    def __str__(self) -> str:
        shape = f"(batch, {{}}, {', '.join(map(str, self.trained.patch))})"
        channels, outputs = len(self.trained.card["channels"]), len(self.trained.outputs)
        sizes = (f"{file} ({file.stat().st_size / MIB:.1f} MiB)" for file in self.files)
        written = " and ".join(sizes)
        trained = str(self.trained.card["config"]["precision"])
        half = "" if trained == "32" else f" in float32 (trained with precision={trained})"
        return (
            f"{written}, {self.kind}, {shape.format(channels)} -> {shape.format(outputs)}{half}; "
            f"on {self.patches.told} {self.equality}"
        )


def export(request: ComposedConfig) -> ExportResult:
    """Check the config, write the file, and leave it there if it gives what the network gives."""
    cfg = request.config
    format, output = get_format(cfg.format), Path(str(cfg.output))
    check_output(output, format, str(cfg.format))
    require_packages(format, str(cfg.format))
    with temporary_output(output) as draft:
        allow_targets = list(cfg.allow_targets)
        trained = load_trained(cfg.checkpoint, cfg.patch_size, allow_targets)
        own = get_inference_fn(trained.network, Precision("32", "32"), CPU)
        check_patch(own, trained)
        patches = load_sample_patches(cfg.input, trained.card, trained.patch, allow_targets)
        program = export_program(
            to_plain_operators(trained.network), len(trained.card["channels"]), trained.patch
        )
        kind = format.write(program, draft, make_export_metadata(trained))
        equality = verify_export(draft, format, own, trained, patches)
        files = commit_output(draft, output)
    return ExportResult(
        files=files,
        kind=kind,
        trained=trained,
        equality=equality,
        patches=patches,
    )


def get_format(asked: Any) -> ModuleType:
    """What writes and reads a format."""
    if str(asked) not in FORMATS:
        near = get_close_matches(str(asked), FORMATS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"format must be {' or '.join(FORMATS)}, got {asked!r}{hint}")
    return FORMATS[str(asked)]


def check_output(output: Path, format: ModuleType, name: str) -> None:
    """Refuse what cannot become the file before anything is computed."""
    if output.suffix != format.ENDING:
        others = [f"{k} writes {m.ENDING}" for k, m in FORMATS.items() if k != name]
        raise UsageError(
            f"output={output} must end in {format.ENDING} for format={name} ({', '.join(others)})"
        )
    if output.is_dir():
        raise UsageError(f"output={output} is a folder: name a file in it")
    if not output.parent.is_dir():
        raise UsageError(f"output={output}: there is no folder {output.parent.absolute()}")


@contextmanager
def temporary_output(output: Path) -> Generator[Path]:
    """A name for the file in a folder beside it, which goes with all that is still in it."""
    try:
        folder = TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent)
    except OSError as error:
        where = output.parent.absolute()
        raise UsageError(
            f"output={output}: nothing can be written to {where}: {error.strerror}"
        ) from error
    with folder as name:
        yield Path(name) / output.name


def commit_output(draft: Path, output: Path) -> list[Path]:
    """Move the draft, and before it the weights that may lie beside it, to where they are asked."""
    files = sorted(draft.parent.iterdir(), reverse=True)
    for file in files:
        with atomic_write(output.with_name(file.name)) as target:
            file.replace(target)
    return [output.with_name(file.name) for file in reversed(files)]


def require_packages(format: ModuleType, name: str) -> None:
    """Refuse a format whose packages are not installed."""
    try:
        with quiet():
            for package in format.NEEDS:
                import_module(package)
    except ImportError as error:
        raise UsageError(
            f"format={name} needs {', '.join(format.NEEDS)}: pip install 'unet3d[export]' "
            f"({summarize_error(error)})"
        ) from error


def load_trained(asked: Any, patch_size: Any, allow_targets: Sequence[str]) -> TrainedNetwork:
    """The one network that a checkpoint's card describes, with its weights."""
    members = [resolve_checkpoint(path) for path in expand_paths(asked)]
    if len(members) != 1:
        raise UsageError(
            f"checkpoint names {len(members)}: a file holds one network; export each by itself "
            "and take the mean of their logits, as predict does"
        )
    path = members[0]
    content = load_checkpoint(path)
    card = validate_metadata(path, content)
    network = load_network(path, card, extract_weights(path, content), allow_targets)
    patch = card["config"]["data"]["patch_size"] if patch_size is None else patch_size
    good = isinstance(patch, list | ListConfig) and len(patch) == 3
    if not good or any(type(side) is not int or side < 1 for side in patch):
        raise UsageError(f"patch_size must be three ints >= 1 or null, got {patch_size!r}")
    d, h, w = patch
    return TrainedNetwork(network=network, card=card, patch=(d, h, w))


def check_patch(own: Network, trained: TrainedNetwork) -> None:
    """Refuse a patch that the network cannot take, and outputs that are not its classes."""
    shape = (1, len(trained.card["channels"]), *trained.patch)
    try:
        outputs, _ = measure_window_memory([own], [trained.network], shape, CPU)
    except (UsageError, DoesNotFitError):
        raise
    except Exception as error:
        raise UsageError(
            f"{type(trained.network).__name__} cannot take patches of "
            f"{'x'.join(map(str, trained.patch))}: {summarize_error(error)}"
        ) from error
    if outputs != len(trained.outputs):
        raise UsageError(
            f"the network gives {outputs} outputs for its classes {', '.join(trained.outputs)}"
        )


def to_plain_operators(network: nn.Module) -> nn.Module:
    """The network in plain modules and operators; its weights are shared, not copied."""
    weights = [*network.parameters(), *network.buffers()]
    copy = deepcopy(network, {id(weight): weight for weight in weights})
    replace_with_plain(copy)
    if isinstance(copy, HasRetentionPolicy):
        copy.keep = None
    return copy


def make_export_metadata(trained: TrainedNetwork) -> dict[str, Any]:
    """What whoever runs the file needs to know, as plain values."""
    card, regions = trained.card, trained.card.get("regions")
    preparation = Preprocessing.from_dict(card["preparation"])
    intensities = preparation.intensities
    numbers = ("mean", "deviation", "percentile_0_5", "percentile_99_5")
    return {
        "unet3d": __version__,
        "channels": list(card["channels"]),
        "patch_size": list(trained.patch),
        "orientation": preparation.orientation,
        "spacing_mm": None if preparation.spacing_mm is None else list(preparation.spacing_mm),
        "background": list(preparation.background),
        "crop": preparation.crop,
        "normalize": normalizations(preparation, len(card["channels"])),
        "intensities": intensities and [dict(zip(numbers, i, strict=True)) for i in intensities],
        "classes": list(card["classes"]),
        "outputs": trained.outputs,
        "activation": "softmax" if regions is None else "sigmoid",
        "regions": regions,
        "labels": list(range(len(card["classes"])))
        if regions is None
        else get_region_labels(regions),
        "largest_component": list(card.get("largest_component") or ()),
        "trained_precision": str(card["config"]["precision"]),
    }


def normalizations(preparation: Preprocessing, channels: int) -> list[str]:
    """One word for each channel."""
    words = list(preparation.normalize)
    return words if len(words) == channels else words * channels


def verify_export(
    draft: Path, format: ModuleType, own: Network, trained: TrainedNetwork, patches: SamplePatches
) -> Parity:
    """Fault unless the file gives what the checkpoint's own network gives, as predict runs it."""
    regions = trained.card.get("regions")
    decide = argmax_labels if regions is None else RegionsToLabels(get_region_labels(regions))
    try:
        found = compare_outputs(own, format.Opened(draft), patches.batches(), decide)
    except (RunError, MemoryError):
        raise
    except Exception as error:
        raise RunError(
            f"the exported network fails where the checkpoint's does not: {error}"
        ) from error
    if not found.passed:
        raise RunError(
            f"the exported network is not the checkpoint's, and no file is left: on {patches.told} "
            f"{found}; {TOLERANCE:.0e} of the largest logit is what rounding may make"
        )
    return found
