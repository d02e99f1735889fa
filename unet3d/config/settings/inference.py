"""Settings of `unet3d predict`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.training import SlidingWindowSettings, parse_precision, parse_windows
from unet3d.config.values import (
    is_number,
    is_text,
    read,
    read_bool,
    read_choice,
    read_device,
    read_devices,
    read_names,
    read_path,
    read_paths,
    read_str,
)
from unet3d.errors import UsageError
from unet3d.types import BACKENDS
from unet3d.units import GIB


@dataclass(frozen=True, kw_only=True)
class InferenceSettings:
    """What to segment, with which checkpoints, and how."""

    checkpoints: tuple[Path, ...]
    input: Path
    output: Path
    windows: SlidingWindowSettings
    flip_axes: tuple[int, ...] | None  # test-time augmentation; None: those of training
    precision: str | None  # None: as the first network was trained
    device: str
    devices: int | None  # processes that share the scans; None: one per GPU
    backend: str  # that runs the networks
    skip_background: float | None  # level up to which a window is background; None: skip none
    prefetch: bool  # read the next scan while one is segmented
    memory_bytes: int | None  # RAM of a case beside the networks; None: what is free
    keep_largest_component: tuple[str, ...] | None  # classes; None: as chosen in training
    save_probabilities: bool
    output_format: str  # auto, or the name of a format
    overwrite: bool
    allow_targets: tuple[str, ...]
    debug: bool
    share: tuple[int, int] = (0, 1)  # (n, count): every count-th scan from the n-th on


def parse_inference(composed: ComposedConfig) -> InferenceSettings:
    """Check and parse the config of `unet3d predict`."""
    config = composed.config
    precision, devices = read(config, "precision"), read_devices(config, "devices")
    device = read_device(config, "device")
    if ":" in device and devices != 1:
        raise UsageError(f"device={device} is one GPU: use device=cuda for devices={devices}")
    return InferenceSettings(
        checkpoints=read_paths(config, "checkpoint"),
        input=read_path(config, "input"),
        output=read_path(config, "output"),
        windows=parse_windows(config),
        flip_axes=_parse_flip_axes(read(config, "tta")),
        precision=None if precision is None else parse_precision(precision),
        device=device,
        devices=None if devices == "auto" else devices,
        backend=read_choice(config, "backend", BACKENDS),
        skip_background=_parse_level(read(config, "skip_background")),
        prefetch=read_bool(config, "prefetch"),
        memory_bytes=_parse_memory(read(config, "memory_gib")),
        keep_largest_component=_parse_classes(config),
        save_probabilities=read_bool(config, "save_probabilities"),
        output_format=read_str(config, "output_format"),
        overwrite=read_bool(config, "overwrite"),
        allow_targets=read_names(config, "allow_targets"),
        debug=read_bool(config, "debug"),
    )


def _parse_flip_axes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, bool):
        return None if value else ()
    axes = value if isinstance(value, list) else [value]
    are_axes = all(type(axis) is int and axis in (0, 1, 2) for axis in axes)
    if not are_axes or len(set(axes)) < len(axes):
        raise UsageError(f"tta must be true, false or a list of the axes 0, 1 and 2, got {value!r}")
    return tuple(axes)


def _parse_level(value: Any) -> float | None:
    if value is None:
        return None
    if not is_number(value) or not 0 <= value < 1:
        raise UsageError(f"skip_background must be null or a number in [0, 1), got {value!r}")
    return float(value)


def _parse_memory(value: Any) -> int | None:
    if value == "auto":
        return None
    if not is_number(value) or value <= 0:
        raise UsageError(f"memory_gib must be auto or a number above 0, got {value!r}")
    return int(value * GIB)


def _parse_classes(config: DictConfig) -> tuple[str, ...] | None:
    value = read(config, "keep_largest_component")
    if value == "auto":
        return None
    if value in (None, "none"):
        return ()
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(map(is_text, names)):
        raise UsageError(
            f"keep_largest_component must be auto, none or a list of classes, got {value!r}"
        )
    return tuple(str(name).strip() for name in names)
