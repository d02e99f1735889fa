"""Resolve options of predict that depend on the networks or on the scans, and describe them."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from unet3d.data.formats.volumes import OUTPUT_FORMATS, SUFFIX_LIST, split_suffix
from unet3d.data.layouts.scans import ScanFiles
from unet3d.errors import UsageError
from unet3d.inference.ensemble import Ensemble
from unet3d.inference.predictor import Predictor, ScanTask
from unet3d.text import format_bytes


def resolve_flip_axes(
    requested: Sequence[int] | None, ensemble: Ensemble, option: str
) -> tuple[int, ...]:
    """Return the axes to flip, those of training if None; refuse those that training did not flip.

    A network that never saw a mirrored scan segments it wrongly. `option` is what the user knows
    the axes as.
    """
    trained = ensemble.mirroring_axes
    if requested is None:
        if trained is None:
            raise UsageError(
                f"{option}: the checkpoint does not say which axes training flipped: name them, as "
                f"in {option}=[0,1]"
            )
        return trained
    if trained is not None and not set(requested) <= set(trained):
        flipped = f"only the axes {list(trained)}" if trained else "no axis"
        raise UsageError(
            f"{option}={list(requested)}: training flipped {flipped}, and a network segments "
            "wrongly what it has never seen mirrored: leave the other axes out"
        )
    return tuple(requested)


def describe_mirroring(ensemble: Ensemble) -> str:
    """Say what test-time augmentation along the axes of training does."""
    training = "training" if len(ensemble.networks) == 1 else "the training of every network"
    if not ensemble.mirroring_axes:
        return f"nothing to mirror, because there is no axis that {training} flipped"
    return f"mirroring the axes that {training} flipped: {list(ensemble.mirroring_axes)}"


def check_output(output: Path) -> None:
    """Refuse what is neither a folder nor named as labels: a file, or a new name such as x.png."""
    if split_suffix(output)[1] or output.is_dir():
        return
    if output.exists() or re.fullmatch(r"\.[A-Za-z]{2,5}", output.suffix):
        raise UsageError(
            f"output={output} must be a folder, or for a single scan a file that ends in "
            f"{SUFFIX_LIST}"
        )


def plan_outputs(
    scans: Sequence[ScanFiles],
    source: Path,
    output: Path,
    *,
    save_probabilities: bool,
    output_format: str = "auto",
) -> list[ScanTask]:
    """Return where each scan's results go, and make the folder for them."""
    if output_format not in ("auto", *OUTPUT_FORMATS):
        raise UsageError(
            f"output_format must be auto, {', '.join(OUTPUT_FORMATS)}, got {output_format!r}"
        )
    check_output(output)
    is_file = bool(split_suffix(output)[1])
    if is_file and output_format != "auto":
        raise UsageError(f"output={output} names a format: leave out output_format={output_format}")
    if is_file and len(scans) > 1:
        raise UsageError(f"output={output} is one file, but there are {len(scans)} scans")
    folder = output.parent if is_file else output
    if os.path.realpath(folder) == os.path.realpath(source if source.is_dir() else source.parent):
        raise UsageError(f"output={output} must not be the folder of the images")
    probabilities = folder / "probabilities"
    (probabilities if save_probabilities else folder).mkdir(parents=True, exist_ok=True)
    suffix = OUTPUT_FORMATS.get(output_format)
    return [
        ScanTask(
            scan=scan,
            labels=output if is_file else folder / f"{scan.name}{suffix or scan.suffix}",
            probabilities=probabilities / f"{scan.name}.nii" if save_probabilities else None,
        )
        for scan in scans
    ]


def summarize_predictor(predictor: Predictor) -> str:
    """Say which networks predict, on which device and in which precision."""
    ensemble, precision = predictor.ensemble, predictor.precision
    summary = f"{describe_networks(ensemble)}, precision {precision.used}"
    if precision.requested != precision.used:
        summary += f" (instead of {precision.requested}: {precision.reason})"
    patch, window = "x".join(map(str, ensemble.patch_size)), format_bytes(predictor.window_bytes)
    device = predictor.device.type
    if predictor.backend != "torch":
        device += f" with backend={predictor.backend}"
    return (
        f"{summary}, on {device}; windows of {patch} take {window}\n"
        f"channels {', '.join(ensemble.channels)}; classes {', '.join(ensemble.classes)}"
    )


def describe_networks(ensemble: Ensemble) -> str:
    """Say which networks an ensemble has, and how large they are."""
    networks = ensemble.networks
    parameters = sum(p.numel() for network in networks for p in network.parameters())
    name = type(networks[0]).__name__ if len(networks) == 1 else f"{len(networks)} networks"
    return f"{name}, {parameters:,} parameters"
