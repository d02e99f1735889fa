"""Settings of the commands that load checkpoints: `unet3d predict` and `unet3d export`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.training import SlidingWindowSettings
from unet3d.config.values import (
    DEVICE_KIND,
    PRECISION,
    TEXT,
    Kind,
    integer,
    number,
    one_of,
    one_or_list_of,
    read_settings,
    word_or,
)
from unet3d.errors import UsageError
from unet3d.types import BACKENDS, Triple
from unet3d.units import GIB


def _are_axes(value: Any) -> bool:
    is_list = isinstance(value, list) and all(type(axis) is int for axis in value)
    return is_list and set(value) <= {0, 1, 2} and len(set(value)) == len(value)


AXES = word_or(True, word_or(False, Kind("a list of the axes 0, 1 and 2", _are_axes, tuple), ()))
ONE_OR_MORE = one_or_list_of(TEXT)
CLASSES = word_or(
    "auto",
    Kind(
        "none or a list of classes",
        lambda value: value in (None, "none", []) or ONE_OR_MORE.accepts(value),
        lambda value: () if value in (None, "none", []) else ONE_OR_MORE.convert(value),
    ),
)
MEMORY = word_or("auto", replace(number("above 0"), convert=lambda value: int(value * GIB)))


@dataclass(frozen=True, kw_only=True)
class InferenceSettings:
    """What to segment, with which checkpoints, and how."""

    checkpoints: Annotated[tuple[Path, ...], "checkpoint"]
    input: Path
    output: Path
    windows: SlidingWindowSettings
    flip_axes: Annotated[tuple[int, ...] | None, AXES, "tta"]  # None: those of training
    precision: Annotated[str | None, PRECISION]  # None: as the first network was trained
    device: Annotated[str, DEVICE_KIND]
    devices: Annotated[int | None, word_or("auto", integer(">= 1"))]  # processes; None: one per GPU
    backend: Annotated[str, one_of(BACKENDS)]  # that runs the networks
    skip_background: Annotated[float | None, number(">= 0", "below 1")]  # None: skip no window
    prefetch: bool  # read the next scan while one is segmented
    memory_bytes: Annotated[int | None, MEMORY, "memory_gib"]  # RAM of a case; None: what is free
    keep_largest_component: Annotated[tuple[str, ...] | None, CLASSES]  # None: as in training
    save_probabilities: bool
    output_format: str  # auto, or the name of a format
    overwrite: bool
    allow_targets: tuple[str, ...]
    debug: bool
    share: tuple[int, int] = (0, 1)  # (n, count): every count-th scan from the n-th on


def parse_inference(composed: ComposedConfig) -> InferenceSettings:
    """Check and parse the config of `unet3d predict`."""
    windows = read_settings(SlidingWindowSettings, composed.config)
    settings = read_settings(InferenceSettings, composed.config, windows=windows)
    device, devices = settings.device, settings.devices
    if ":" in device and devices != 1:
        raise UsageError(
            f"device={device} is one GPU: use device=cuda for devices={devices or 'auto'}"
        )
    return settings


ENDINGS = {"onnx": ".onnx", "torch_export": ".pt2", "nnunet": "", "bundle": ""}
"""The ending of a file in each format; without one, a folder."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Which checkpoint to export, and how."""

    checkpoints: Annotated[tuple[Path, ...], "checkpoint"]
    output: Path
    format: Annotated[str, one_of(tuple(ENDINGS))]
    patch_size: Triple | None  # None: as in training
    input: Path | None  # scans to compare on
    allow_targets: tuple[str, ...]


def parse_export(composed: ComposedConfig) -> ExportSettings:
    """Check and parse the config of `unet3d export`."""
    settings = read_settings(ExportSettings, composed.config)
    if settings.output.suffix != ENDINGS[settings.format]:
        others = [f"{k} writes {ending or 'a folder'}" for k, ending in ENDINGS.items()]
        raise UsageError(
            f"output={settings.output} does not fit format={settings.format}: "
            f"{', '.join(others)}, which has no ending"
        )
    return settings
