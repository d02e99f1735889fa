"""Resolve what an evaluation scores: classes, tolerances, metrics, and which cases are held out."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from unet3d.checkpoint_file import load_checkpoint
from unet3d.config.settings.evaluation import EvaluationSettings
from unet3d.data.annotated import Annotations, read_annotations
from unet3d.data.layouts.label_names import LabelNames, find_label_names
from unet3d.errors import UsageError
from unet3d.metric.case_metric import ClassMetric
from unet3d.workflows.evaluation.metrics import build_metrics, select_class_metrics


def resolve_classes(settings: EvaluationSettings) -> LabelNames | None:
    """Return the classes of the settings or of a dataset.json; None: every label is a class."""
    references = settings.references
    if settings.classes is not None:
        names = _number_classes(settings.classes)
    else:
        names = find_label_names(
            references if references.is_dir() else references.absolute().parent
        )
    if settings.regions is None:
        return names
    return LabelNames(
        classes=settings.regions,
        known_labels=None if names is None else names.known_labels,
        ignore_labels=() if names is None else names.ignore_labels,
    )


def resolve_annotations(
    settings: EvaluationSettings, names: LabelNames | None
) -> Annotations | None:
    """Return which classes the references annotate; None: all of them."""
    if settings.annotated is None:
        return None
    if names is None:
        raise UsageError("annotated needs classes= or regions= to name them")
    return read_annotations("annotated", settings.annotated, list(names.classes))


def resolve_ignore_labels(
    settings: EvaluationSettings, names: LabelNames | None
) -> tuple[int, ...]:
    """Return the labels to ignore, of the settings or else of a dataset.json."""
    if settings.ignore_labels is None:
        return () if names is None else names.ignore_labels
    for name, labels in ({} if names is None else names.classes).items():
        for label in settings.ignore_labels:
            if label in labels:
                raise UsageError(
                    f"ignore_label={label} is a label of the class {name}: ignore another label, "
                    "or leave the class out of classes= or regions="
                )
    return settings.ignore_labels


def resolve_metrics(settings: EvaluationSettings) -> list[ClassMetric]:
    """Build the metrics; refuse those that need more than labels."""
    metrics = build_metrics(settings.metrics, settings.regions)
    for name, metric in zip(settings.metrics, metrics, strict=True):
        if not isinstance(metric, ClassMetric):
            raise UsageError(
                f"metrics.{name} needs the probabilities of a network, which files of labels do "
                "not have: it is a metric of validation"
            )
    return select_class_metrics(metrics)


def resolve_tolerance(
    settings: EvaluationSettings, names: LabelNames | None
) -> float | Mapping[str, float]:
    """Return one distance in mm for all classes, or one for each."""
    tolerance = settings.tolerance_mm
    if not isinstance(tolerance, Mapping):
        return tolerance
    if names is None:
        raise UsageError("tolerance_mm for each class needs classes= or regions= to name them")
    if tolerance.keys() != names.classes.keys():
        raise UsageError(
            f"tolerance_mm must name every class once: {', '.join(names.classes)}; it names "
            f"{', '.join(tolerance)}"
        )
    return tolerance


def resolve_roles(checkpoints: Sequence[Path], names: Iterable[str]) -> dict[str, list[str]] | None:
    """Return the cases that trained a checkpoint, that chose it, and that did neither, by name.

    None: the predictions may be of any checkpoint.
    """
    if not checkpoints:
        return None
    roles: dict[str, list[str]] = {"training": [], "validation": [], "held out": []}
    known = [_read_cases(path) for path in checkpoints]
    for name in names:
        used = (part for part in ("training", "validation") if any(name in c[part] for c in known))
        roles[next(used, "held out")].append(name)
    return roles


def _read_cases(path: Path) -> Mapping[str, Mapping[str, str]]:
    """Return the cases of a checkpoint's run by part; their digests need the images, too."""
    files = [path / "checkpoints" / name for name in ("best.ckpt", "last.ckpt")]
    file = next((file for file in files if file.is_file()), path)
    content = load_checkpoint(file)
    try:
        cases = content["callbacks"]["ResumeState"]["fixed_settings"]["cases"]
        return {part: dict(cases[part]) for part in ("training", "validation")}
    except (LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"checkpoint={path}: it does not list the cases of its run: leave out checkpoint=, "
            "then nothing is said about held-out cases"
        ) from error


def _number_classes(classes: tuple[str, ...]) -> LabelNames:
    labels = {name: (label,) for label, name in enumerate(classes) if label > 0}
    return LabelNames(classes=labels, known_labels=frozenset(range(len(classes))))
