"""From a config to a predictor and its tasks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig

from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import expand_paths
from unet3d.data.layouts.unlabelled import ScanFiles, find_scans
from unet3d.data.nifti.stream import ENDINGS
from unet3d.errors import UsageError
from unet3d.machine.device import Precision, resolve_device, resolve_precision
from unet3d.units import GIB, format_bytes
from unet3d.workflows.inference.ensemble import Ensemble, load_ensemble
from unet3d.workflows.inference.predictor import Predictor, ScanTask


@dataclass(frozen=True, kw_only=True)
class InferenceJob:
    """Everything that `unet3d predict` needs, ready to start."""

    predictor: Predictor
    tasks: list[ScanTask]  # without those that are done
    skipped: int
    output: Path
    introduction: str


def build_inference(request: ComposedConfig) -> InferenceJob:
    """Check the config, load the networks and list what is to be done."""
    cfg = request.config
    device = resolve_device(str(cfg.device), "device")
    members = load_ensemble(
        [resolve_checkpoint(path) for path in expand_paths(cfg.checkpoint)], list(cfg.allow_targets)
    )
    used = resolve_inference_precision(cfg, members, device)
    windows = parse_windows(cfg)
    kept, ram = parse_postprocessing(cfg, members), parse_memory_budget(cfg.memory_gib)
    source, target = Path(str(cfg.input)), Path(str(cfg.output))
    every = plan_outputs(
        find_scans(source, members.channels), source, target, probabilities=bool(cfg.probabilities)
    )
    left = [task for task in every if cfg.overwrite or not task.done]
    predictor = Predictor(
        members, device=torch.device(device), used=used, kept=kept, ram=ram, **windows
    )
    return InferenceJob(
        predictor=predictor,
        tasks=left,
        skipped=len(every) - len(left),
        output=target,
        introduction=summarize_job(members, predictor, used, device),
    )


def resolve_checkpoint(path: Path) -> Path:
    """A file, or the best (else the last) checkpoint of a run's folder."""
    if not path.is_dir():
        return path
    for name in ("best.ckpt", "last.ckpt"):
        if (path / "checkpoints" / name).is_file():
            return path / "checkpoints" / name
    raise UsageError(
        f"checkpoint={path}: there is no best.ckpt or last.ckpt in {path / 'checkpoints'}"
    )


def resolve_inference_precision(cfg: DictConfig, members: Ensemble, device: str) -> Precision:
    """What is asked for, or as the network was trained, as far as the device can."""
    if cfg.precision is None and members.precision == "16-true" and device == "cpu":
        return Precision("16-true", "32", "as trained; a CPU does not compute in pure fp16")
    return resolve_precision(members.precision if cfg.precision is None else cfg.precision, device)


def parse_windows(cfg: DictConfig) -> dict[str, Any]:
    """How windows are laid, flipped and batched."""
    if not isinstance(cfg.overlap, int | float) or not 0 <= cfg.overlap < 1:
        raise UsageError(f"overlap must be in 0..1 (1 excluded), got {cfg.overlap}")
    if not isinstance(cfg.batch_size, int) or cfg.batch_size < 1:
        raise UsageError(f"batch_size must be an int >= 1, got {cfg.batch_size}")
    mirror = cfg.tta
    if isinstance(mirror, bool):
        axes = [0, 1, 2] if mirror else []
    else:
        axes = list(mirror) if isinstance(mirror, ListConfig) else [mirror]
        if len(set(axes)) != len(axes) or any(axis not in (0, 1, 2) for axis in axes):
            raise UsageError(f"tta must be true, false or axes of 0, 1 and 2, got {mirror}")
    return {"overlap": float(cfg.overlap), "batch_size": cfg.batch_size, "mirror": axes}


def parse_postprocessing(cfg: DictConfig, members: Ensemble) -> list[int]:
    """The labels of which the largest piece alone is kept."""
    asked = cfg.keep_largest_component
    if asked in (None, "none"):
        return []
    if asked == "auto":
        names: Sequence[str] = members.largest
    else:
        words = asked if isinstance(asked, ListConfig) else str(asked).split(",")
        names = [str(word).strip() for word in words]
    known = members.classes[1:]
    for name in names:
        if name not in known:
            raise UsageError(
                f"keep_largest_component must be auto, none or of {', '.join(known)}, got {name!r}"
            )
    return [members.classes.index(name) for name in names]


def parse_memory_budget(asked: Any) -> int | None:
    """GiB as bytes; None for `auto`."""
    if asked == "auto":
        return None
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked > 0:
        raise UsageError(f"memory_gib must be above 0 or auto, got {asked!r}")
    return int(asked * GIB)


def plan_outputs(
    found: Sequence[ScanFiles], source: Path, target: Path, *, probabilities: bool
) -> list[ScanTask]:
    """Where each scan's results go; their folder is made."""
    single = target.name.endswith(ENDINGS)
    folder = target.parent if single else target
    if single and len(found) > 1:
        raise UsageError(f"output={target}: {len(found)} scans need a folder")
    if not single and target.exists() and not target.is_dir():
        raise UsageError(f"output={target} must be a folder, a .nii or a .nii.gz")
    if os.path.realpath(folder) == os.path.realpath(source if source.is_dir() else source.parent):
        raise UsageError(f"output={target}: results need a folder other than that of the images")
    folder.mkdir(parents=True, exist_ok=True)
    if probabilities:
        (folder / "probabilities").mkdir(exist_ok=True)
    return [
        ScanTask(
            scan=scan,
            labels=target if single else folder / f"{scan.name}{scan.ending}",
            probabilities=folder / "probabilities" / f"{scan.name}.nii" if probabilities else None,
        )
        for scan in found
    ]


def summarize_job(members: Ensemble, predictor: Predictor, used: Precision, device: str) -> str:
    """The first line: what predicts, where, in which precision."""
    parameters = sum(p.numel() for network in members.networks for p in network.parameters())
    count = len(members.networks)
    said = f"{type(members.networks[0]).__name__}" if count == 1 else f"{count} networks"
    said += f", {parameters:,} parameters, precision {used.used}"
    if used.asked != used.used:
        said += f" (instead of {used.asked}: {used.why})"
    patch = "x".join(map(str, members.patch))
    return (
        f"{said}, on {device}; windows of {patch} take {format_bytes(predictor.window_bytes)}\n"
        f"channels {', '.join(members.channels)}; classes {', '.join(members.classes)}"
    )
