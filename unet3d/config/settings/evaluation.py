"""Settings of `unet3d evaluate`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import Factory
from unet3d.config.values import (
    ANNOTATED,
    NAMES,
    PATHS,
    REGIONS,
    SKIP,
    Kind,
    integer,
    mapping_of,
    number,
    one_or_list_of,
    read_settings,
    word_or,
)
from unet3d.errors import UsageError
from unet3d.text import are_unique_names

TRAINING_FILES = ("report.json", "curves.json")
"""What training writes, and no evaluation."""

CLASSES = Kind(
    "unique names, background first, as in classes=[background,liver]",
    lambda v: NAMES.accepts(v) and len(v) > 1 and are_unique_names(NAMES.convert(v)),
    NAMES.convert,
)
LABELS = one_or_list_of(integer(), "an int, a list of ints, or null")
DISTANCES = mapping_of(number(">= 0"), "a distance of each class")
TOLERANCE = Kind(
    "a distance in mm, or one of each class, 0 or more",
    lambda value: DISTANCES.accepts(value) or number(">= 0").accepts(value),
    lambda value: DISTANCES.convert(value) if isinstance(value, dict) else float(value),
)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What to compare, and which classes to score."""

    predictions: tuple[Path, ...]
    references: Path
    skip_missing_predictions: Annotated[bool, SKIP, "missing_predictions"]
    checkpoints: Annotated[tuple[Path, ...], word_or(None, PATHS, ()), "checkpoint"]
    output: Path | None  # None: no files are written
    images: Path | None
    classes: Annotated[tuple[str, ...] | None, CLASSES]  # names of the labels 0, 1, 2, ...
    regions: Annotated[Mapping[str, tuple[int, ...]] | None, REGIONS]
    annotated: Annotated[Any | None, ANNOTATED]  # None: all classes
    group_by: str | None  # pattern of case names, or a file; None: cases are independent
    ignore_labels: Annotated[tuple[int, ...] | None, LABELS, "ignore_label"]  # None: dataset.json's
    tolerance_mm: Annotated[float | Mapping[str, float], TOLERANCE]
    metrics: Mapping[str, Factory]  # by name
    draw_worst: Annotated[int, integer(">= 0")]
    workers: Annotated[int, integer(">= 1")]
    command: str  # the command line that asks for this


def parse_evaluation(composed: ComposedConfig) -> EvaluationSettings:
    """Check and parse the config of `unet3d evaluate`."""
    command = composed.composition.format_command()
    settings = read_settings(EvaluationSettings, composed.config, command=command)
    output, images = settings.output, settings.images
    if output is not None and output.exists() and not output.is_dir():
        raise UsageError(f"output: {output} is a file; it must be a folder")
    if output is not None and any((output / name).exists() for name in TRAINING_FILES):
        raise UsageError(
            f"output: {output} holds a training run, whose report.html would be replaced: set "
            f"another folder, as in output={output / 'scores'}"
        )
    if images is not None and not images.exists():
        raise UsageError(f"images: {images} is neither a file nor a folder")
    return settings
