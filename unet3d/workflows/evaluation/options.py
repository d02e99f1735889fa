"""Which classes an evaluation scores, and how far their surfaces may lie apart."""

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from unet3d.data.layouts.label_names import LabelNames, label_names
from unet3d.errors import UsageError


def resolve_classes(cfg: Mapping[str, Any]) -> LabelNames | None:
    """As `regions`, `classes` or a dataset.json say; None: every label found is a class."""
    references = Path(cfg["references"])
    if cfg["classes"] is not None:
        names = _listed(cfg["classes"])
    else:
        names = label_names(references if references.is_dir() else references.absolute().parent)
    if cfg["regions"] is not None:
        names = LabelNames(
            classes=_regions(cfg["regions"]),
            known=None if names is None else names.known,
            ignore_label=None if names is None else names.ignore_label,
        )
    return names


def resolve_ignore_label(cfg: Mapping[str, Any], names: LabelNames | None) -> int | None:
    """The label to ignore, of the config or else of a dataset.json."""
    label = cfg["ignore_label"]
    if label is None:
        return None if names is None else names.ignore_label
    if not isinstance(label, int):
        raise UsageError(f"ignore_label must be an int or null, got {label!r}")
    for name, members in ({} if names is None else names.classes).items():
        if label in members:
            raise UsageError(f"ignore_label={label} is a label of the class {name}")
    return label


def parse_tolerance(value: Any, names: LabelNames | None) -> float | Mapping[str, float]:
    """One distance in mm for all classes, or one for each."""
    if not isinstance(value, dict):
        return _distance("tolerance_mm", value)
    if names is None:
        raise UsageError("tolerance_mm for each class needs classes= or regions= to name them")
    given = {str(name): _distance(f"tolerance_mm.{name}", v) for name, v in value.items()}
    if given.keys() != names.classes.keys():
        raise UsageError(
            f"tolerance_mm must name every class once: {', '.join(names.classes)}; it names "
            f"{', '.join(given)}"
        )
    return given


def _distance(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < inf:
        raise UsageError(f"{key} must be a distance in mm, 0 or more, got {value!r}")
    return float(value)


def _listed(classes: Any) -> LabelNames:
    names = list(map(str, classes)) if isinstance(classes, list) else []
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError(
            "classes must be different names, that of the background first, as in "
            f"classes=[background,liver], got {classes!r}"
        )
    numbered = {name: (label,) for label, name in enumerate(names) if label > 0}
    return LabelNames(classes=numbered, known=frozenset(range(len(names))))


def _regions(regions: Any) -> dict[str, tuple[int, ...]]:
    made = {}
    for name, labels in regions.items() if isinstance(regions, dict) else ():
        members = labels if isinstance(labels, list) else [labels]
        if all(isinstance(label, int) for label in members):
            made[str(name)] = tuple(members)
    if not made or len(made) < len(regions):
        raise UsageError(
            "regions must be names with their labels, as in regions={whole:[1,2]}, "
            f"got {regions!r}"
        )
    return made
