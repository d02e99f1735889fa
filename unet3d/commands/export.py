"""`unet3d export checkpoint=... output=net.onnx`: export a network for other programs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from unet3d import __version__
from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import one_of, read_settings
from unet3d.data.dataset import get_region_labels
from unet3d.data.layouts.scans import find_scans
from unet3d.data.loading.datasets import crop_padded
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import RunError, UsageError
from unet3d.export import formats
from unet3d.export.bundle import get_network_path, write_description
from unet3d.files import add_path_to_errors, read_report
from unet3d.inference.ensemble import Ensemble, TrainedNetwork, combine_members, load_members
from unet3d.inference.heads import Network
from unet3d.inference.label_writer import choose_label_function
from unet3d.inference.networks import get_inference_fn, measure_window_memory
from unet3d.machine import Precision
from unet3d.nnunet.model_folder import load_model_folder, write_model_folder
from unet3d.report.run_report import make_model_card
from unet3d.text import MIB, pluralize
from unet3d.types import Triple

ENDINGS = {"onnx": ".onnx", "torch_export": ".pt2", "nnunet": "", "bundle": ""}
"""The ending of a file in each format; without one, a folder."""

CPU = torch.device("cpu")

NUM_PATCHES = 3
"""One for a batch of one, and two for a batch of two."""

NUM_CANDIDATES = 8
"""Random positions tried in a scan."""

TOLERANCE = 1e-3
"""Largest difference of two logits, relative to the largest logit, that counts as rounding.

Our networks' were 4e-6 on patches of noise, and 4e-4 where a 512th of a patch was not constant. On
a constant patch, 2e-2: instance norm divides it by almost 0.
"""


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
            raise UsageError(
                f"output={self.output} does not fit format={self.format}: name a file that ends "
                "in .onnx or .pt2, or a folder without an ending for nnunet and bundle"
            )


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Differences of two networks' outputs on some patches."""

    max_difference: float  # of two logits
    max_logit: float  # absolute value
    agreement: float  # fraction of voxels with the same label

    @property
    def passed(self) -> bool:
        """Return whether the outputs are equal up to rounding; False for NaN."""
        return self.max_difference <= TOLERANCE * self.max_logit < torch.inf

    def __str__(self) -> str:
        percent = int(self.agreement * 1e6) / 1e4  # rounded down: 100 only if all voxels agree
        return (
            f"logits differ by at most {self.max_difference:.1e} (the largest is "
            f"{self.max_logit:.1f}), {percent:g}% of voxels get the same class"
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

    They are compared on patches of the first scan of `input`, by default on noise.
    """
    if output.is_dir() and output.suffix:
        raise UsageError(f"{output} is a folder: name a file in it")
    if output.exists() and not output.suffix:
        raise UsageError(f"{output} exists: name a new folder")
    formats.require_packages(f"the format {format}", formats.REQUIRED_PACKAGES[format])
    members = load_members(checkpoints, allow_targets)
    if patch_size is not None:
        members = [replace(member, patch_size=patch_size) for member in members]
    if len(members) > 1 and format != "bundle":
        raise UsageError(
            f"checkpoint names {len(members)} checkpoints, and a file holds one network: use "
            "format=bundle, or export each and average their logits, as predict does"
        )
    ensemble, metadata = combine_members(members), members[0].metadata
    size = (len(ensemble.channels), *ensemble.patch_size)
    forwards = [get_inference_fn(n, Precision("32", "32"), CPU) for n in ensemble.networks]
    measure_window_memory(forwards, (1, *size), CPU)  # refuses such patches
    patches, source = load_sample_patches(input, metadata, ensemble.patch_size)
    prefix = f".{output.name[-50:]}-"
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=prefix, dir=output.parent) as folder, add_path_to_errors(output):
        draft = Path(folder) / output.name
        kind = write(format, members, ensemble, draft)
        parity = verify_export(format, draft, forwards, ensemble, patches, source)
        drafts = sorted(Path(folder).iterdir(), reverse=True)  # files of external weights first
        files = [file.replace(output.with_name(file.name)) for file in drafts]
    names = []
    for file in files[::-1]:
        parts = [part for part in (file, *file.rglob("*")) if part.is_file()]
        names.append(f"{file} ({sum(part.stat().st_size for part in parts) / MIB:.1f} MiB)")
    shape = f"(batch, {{}}, {', '.join(map(str, ensemble.patch_size))})"
    shapes = f"{shape.format(size[0])} -> {shape.format(len(ensemble.regions or ensemble.classes))}"
    if ensemble.precision != "32":
        shapes += f" in float32 (the run has precision={ensemble.precision})"
    return f"{' and '.join(names)}, {kind}, {shapes}; on {source} {parity}"


def write(format: str, members: Sequence[TrainedNetwork], ensemble: Ensemble, path: Path) -> str:
    """Write networks in a format, and say what it is."""
    if format == "nnunet":
        return write_model_folder(members[0], path)
    pipeline = describe_pipeline(members[0], ensemble)
    if format == "onnx":
        return formats.write_onnx(trace(members[0]), path, pipeline)
    if format == "torch_export":
        return formats.write_torch_export(trace(members[0]), path, pipeline)
    from safetensors.torch import save_file

    (path / "models").mkdir(parents=True)
    for number, member in enumerate(members):
        weights = {name: w.clone().contiguous() for name, w in member.network.state_dict().items()}
        save_file(weights, get_network_path(path, number, ".safetensors"))
        program = trace(member)
        formats.write_onnx(program, get_network_path(path, number, ".onnx"), pipeline)
        formats.write_torch_export(program, get_network_path(path, number, ".pt2"), pipeline)
    described = [member.metadata for member in members]
    reports = [read_report(member.path.parent.parent) or None for member in members]
    write_description(path, pipeline, described, make_model_card(pipeline, described, reports))
    names = ", ".join(dict.fromkeys(str(member.path) for member in members))
    return f"MONAI bundle of {pluralize(len(members), 'network')} ({names})"


def trace(trained: TrainedNetwork) -> ExportedProgram:
    """Return the network's graph of plain operators."""
    shape = (len(trained.channels), *trained.patch_size)
    return formats.export_program(formats.to_plain_operators(trained.network), shape)


def describe_pipeline(first: TrainedNetwork, ensemble: Ensemble) -> dict[str, Any]:
    """Return what is needed to segment with networks that predict together, as plain values."""
    preprocessing, regions = ensemble.preprocessing, ensemble.regions
    labels = list(preprocessing.label_values or range(len(ensemble.classes)))
    if regions is not None:
        labels = get_region_labels(regions, ensemble.region_labels)
    spacing, intensities = preprocessing.spacing_mm, preprocessing.intensities
    keys = ("mean", "deviation", "percentile_0_5", "percentile_99_5")
    return {
        "unet3d": __version__,
        "channels": first.channels,
        "patch_size": list(ensemble.patch_size),
        "orientation": preprocessing.orientation,
        "spacing_mm": None if spacing is None else list(spacing),
        "background": list(preprocessing.background),
        "crop": preprocessing.crop,
        "normalize": first.normalizations,
        "intensities": intensities and [dict(zip(keys, i, strict=True)) for i in intensities],
        "classes": list(ensemble.classes),
        "outputs": list(regions or ensemble.classes),
        "activation": "softmax" if regions is None else "sigmoid",
        "regions": regions,
        "labels": labels,
        "keep_largest_component": list(ensemble.keep_largest_component),
        "mirroring_axes": ensemble.mirroring_axes,
        "trained_precision": ensemble.precision,
    }


def verify_export(
    format: str,
    draft: Path,
    forwards: Sequence[Network],
    ensemble: Ensemble,
    patches: list[Tensor],
    source: str,
) -> Parity:
    """Compare the file's outputs with those of the checkpoint's network, as predict runs it.

    Return the largest difference of all networks in all runtimes.
    """
    decide = choose_label_function(ensemble.regions, ensemble.region_labels)
    batches = [torch.stack(patches[:1]), torch.stack(patches[1:])]  # it has to take any size
    found = [
        compare_outputs(forward, session, batches, decide)
        for number, forward in enumerate(forwards)
        for session in open_sessions(format, draft, number)
    ]
    parity = next((p for p in found if not p.passed), max(found, key=lambda p: p.max_difference))
    if not parity.passed:
        raise RunError(
            "the exported network does not match the checkpoint; the file was removed: on "
            f"{source} {parity}"
        )
    return parity


def open_sessions(format: str, path: Path, number: int) -> list[Network]:
    """Return a network of what was written, in every runtime."""
    if format == "nnunet":
        return [load_model_folder(path)]
    loaders = {".onnx": formats.load_onnx, ".pt2": formats.load_torch_export}
    if format == "bundle":
        return [load(get_network_path(path, number, end)) for end, load in loaders.items()]
    return [loaders[path.suffix](path)]


def compare_outputs(
    reference: Callable[[Tensor], Tensor],
    exported: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
    decide: Callable[[Tensor], Tensor],
) -> Parity:
    """Run two networks on batches (B, C, D, H, W); `decide` turns logits (K, D, H, W) to labels."""
    differences, logits, equal = [], [], []
    for batch in batches:
        expected, actual = reference(batch), exported(batch)
        differences.append((expected - actual).abs().max())
        logits.append(expected.abs().max())
        pairs = zip(expected, actual, strict=True)
        equal += [(decide(one) == decide(other)).double().mean() for one, other in pairs]
    return Parity(  # torch's max keeps NaN, Python's does not
        max_difference=float(torch.stack(differences).max()),
        max_logit=float(torch.stack(logits).max()),
        agreement=float(torch.stack(equal).mean()),
    )


def load_sample_patches(
    scans: Path | None, metadata: Mapping[str, Any], patch_size: Triple
) -> tuple[list[Tensor], str]:
    """Cut patches (C, D, H, W) from the first scan, or make noise; also say which it is."""
    channels = metadata["channels"]
    if scans is None:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(NUM_PATCHES, len(channels), *patch_size, generator=generator)
        return list(noise), f"{NUM_PATCHES} patches of noise"
    files = find_scans(scans, channels)[0].files
    preprocessing = Preprocessing.from_dict(metadata["preprocessing"])
    image, rng = preprocessing.preprocess_scan(files, channels).image, np.random.default_rng(0)
    slack = np.subtract(image.shape[1:], patch_size)
    positions = rng.integers(np.maximum(slack, 0) + 1, size=(NUM_CANDIDATES, 3))
    starts = np.where(slack > 0, positions, slack // 2).tolist()
    # In a constant patch a norm divides by almost nothing, and rounding errors reach the logits.
    varied = sorted((crop_padded(image, start, patch_size) for start in starts), key=np.std)
    patches = [torch.from_numpy(patch) for patch in varied[-NUM_PATCHES:]]
    return patches, f"{NUM_PATCHES} patches of {scans}"
