"""Settings of `unet3d evaluate`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import Factory, read_factories
from unet3d.config.values import (
    is_number,
    read,
    read_annotated,
    read_bool,
    read_choice,
    read_int,
    read_optional_path,
    read_optional_str,
    read_path,
    read_paths,
    read_regions,
)
from unet3d.errors import UsageError
from unet3d.text import are_unique_names

TRAINING_FILES = ("report.json", "curves.json")
"""What training writes, and no evaluation."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What to compare, and which classes to score."""

    predictions: tuple[Path, ...]
    references: Path
    skip_missing_predictions: bool
    checkpoints: tuple[Path, ...]  # that made the predictions; none: unknown
    output: Path | None  # None: no files are written
    images: Path | None
    classes: tuple[str, ...] | None  # names of the labels 0, 1, 2, ...
    regions: Mapping[str, tuple[int, ...]] | None
    annotated: Any  # classes by pattern of case names, or a file; None: all classes
    group_by: str | None  # pattern of case names, or a file; None: cases are independent
    ignore_labels: tuple[int, ...] | None  # None: as dataset.json says
    tolerance_mm: float | Mapping[str, float]
    metrics: Mapping[str, Factory]  # by name
    draw_worst: int
    workers: int
    debug: bool
    command: str  # the command line that asks for this


def parse_evaluation(composed: ComposedConfig) -> EvaluationSettings:
    """Check and parse the config of `unet3d evaluate`."""
    config = composed.config
    output, images = (read_optional_path(config, key) for key in ("output", "images"))
    if output is not None and output.exists() and not output.is_dir():
        raise UsageError(f"output: {output} is a file; it must be a folder")
    if output is not None and any((output / name).exists() for name in TRAINING_FILES):
        raise UsageError(
            f"output: {output} holds a training run, whose report.html would be replaced: set "
            f"another folder, as in output={output / 'scores'}"
        )
    if images is not None and not images.exists():
        raise UsageError(f"images: {images} is neither a file nor a folder")
    missing = read_choice(config, "missing_predictions", ("error", "skip"))
    return EvaluationSettings(
        predictions=read_paths(config, "predictions"),
        references=read_path(config, "references"),
        skip_missing_predictions=missing == "skip",
        checkpoints=() if read(config, "checkpoint") is None else read_paths(config, "checkpoint"),
        output=output,
        images=images,
        classes=_parse_classes(read(config, "classes")),
        regions=read_regions(config, "regions"),
        annotated=read_annotated(config, "annotated"),
        group_by=read_optional_str(config, "group_by"),
        ignore_labels=_parse_ignore_labels(read(config, "ignore_label")),
        tolerance_mm=_parse_tolerance(read(config, "tolerance_mm")),
        metrics=read_factories(config, "metrics"),
        draw_worst=read_int(config, "draw_worst", minimum=0),
        workers=read_int(config, "workers", minimum=1),
        debug=read_bool(config, "debug"),
        command=composed.composition.format_command(),
    )


def _parse_ignore_labels(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    labels = value if isinstance(value, list) else [value]
    if not all(type(label) is int for label in labels):
        raise UsageError(f"ignore_label must be an int, a list of ints, or null, got {value!r}")
    return tuple(labels)


def _parse_tolerance(value: Any) -> float | dict[str, float]:
    if isinstance(value, dict) and value:
        return {str(k): _parse_distance(f"tolerance_mm.{k}", v) for k, v in value.items()}
    return _parse_distance("tolerance_mm", value)


def _parse_distance(key: str, value: Any) -> float:
    if not is_number(value) or value < 0:
        raise UsageError(f"{key} must be a distance in mm, 0 or more, got {value!r}")
    return float(value)


def _parse_classes(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(map(str, value)) if isinstance(value, list) else ()
    if len(names) < 2 or not are_unique_names(names):
        raise UsageError(
            "classes must be unique names, background first, as in classes=[background,liver], "
            f"got {value!r}"
        )
    return names
