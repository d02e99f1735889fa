"""Score predictions against references: every case, their means, and the files of results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volume_format import find_other_name
from unet3d.data.formats.volumes import describe_mixed_axes, read_header, read_label_pair
from unet3d.data.layouts.dataset_json import LabelNames
from unet3d.data.preprocessing.channels import get_spacing
from unet3d.errors import UsageError
from unet3d.files import write_figure
from unet3d.metric import bootstrap
from unet3d.metric.scores import RULES, SCORES, ClassMetric, find_labels, score_case
from unet3d.report.evaluation import (
    Cases,
    average_dice,
    draw_worst_cases,
    plot_scores,
    try_write_evaluation_page,
    write_csv,
)
from unet3d.report.run_report import collect_versions, write_report
from unet3d.text import join_first

AFFINE_TOLERANCE = 1e-3  # affines that differ by more of a voxel are different grids
SAME_GRID = "both must be on the same voxel grid; resample the prediction to the reference's grid"
MIN_SIZE_RATIO = 4  # size of a volume divided by the tolerance, below which surfaces agree anyway
MAX_LABELS = 255  # a file with more labels, none of them named, is taken for an image


def is_same_grid(affine: np.ndarray, other: np.ndarray) -> bool:
    """Return whether affines differ by little of a voxel, and by the rounding of float32 files."""
    voxel = np.linalg.norm(other[:3, :3], axis=0).min()
    tolerance = AFFINE_TOLERANCE * voxel + 1e-6 * np.abs(other[:3]).max()
    return bool(np.abs(affine - other).max() <= tolerance)


@dataclass(frozen=True, kw_only=True)
class CasePair:
    """The files of one case: normally one each."""

    name: str
    prediction: Sequence[Path]  # none: missing; several: ambiguous
    reference: Sequence[Path]
    image: Path | None = None  # what it is drawn over
    unknown: frozenset[str] = frozenset()  # classes that the reference does not annotate


@dataclass(frozen=True, kw_only=True)
class ScoredCase:
    """One case's scores by class, or why there are none."""

    name: str
    scores: Mapping[str, Mapping[str, float]]
    error: str | None = None

    @property
    def dice(self) -> float:
        """Return the mean over the classes that the case has; NaN if it has none."""
        return average_dice(self.scores)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The scores of predictions.

    Attributes:
        mean: by score (``dice``, ``iou``, ``hd95_mm``, ``surface_dice``, ...), the ``mean`` over
            the classes, and ``low`` and ``high``, its 95% confidence interval.
        per_class: the same by class and score.
        cases: by case, class and score, one number.
        errors: why a case could not be scored, by case.
        content: all of this as evaluation.json has it, with definitions and versions.
        files: what was written.
    """

    mean: Mapping[str, Mapping[str, float]]
    per_class: Mapping[str, Mapping[str, Any]]
    cases: Mapping[str, Mapping[str, Mapping[str, float]]]
    errors: Mapping[str, str]
    content: Mapping[str, Any]
    files: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is compared with what, and how."""

    pairs: Sequence[CasePair]
    predictions: str  # where they are, for the record
    references: str
    without_reference: Sequence[str] = ()
    output: Path | None  # None: no files are written
    images: Path | None = None
    draw_worst: int
    workers: int = 1
    names: LabelNames | None  # None: every label is a class
    ignore_labels: tuple[int, ...]
    tolerance_mm: float | Mapping[str, float]
    metrics: Sequence[ClassMetric] = ()
    groups: Mapping[str, str] | None = None  # case: its patient; None: cases are independent
    roles: Mapping[str, Sequence[str]] | None = None  # training, validation, held out; of cases
    command: str | None = None  # shown in the page; None: a run's own page has the scores

    @property
    def scores(self) -> dict[str, str]:
        """Return name and definition of each score."""
        return SCORES | {k: v for metric in self.metrics for k, v in metric.scores.items()}

    def score_all(self) -> Iterator[ScoredCase]:
        """Yield all cases in order."""
        if self.workers == 1:  # in the main thread, so that Ctrl-C takes effect at once
            yield from map(self.score_case, self.pairs)
        else:
            with ThreadPoolExecutor(self.workers) as pool:  # Ctrl-C cancels what has not started
                yield from pool.map(self.score_case, self.pairs)

    def score_case(self, pair: CasePair) -> ScoredCase:
        """Read and score one case."""
        try:
            return ScoredCase(name=pair.name, scores=self._compute_scores(pair))
        except UsageError as error:
            return ScoredCase(name=pair.name, scores={}, error=" ".join(str(error).split()))

    def _compute_scores(self, pair: CasePair) -> dict[str, dict[str, float]]:
        if not pair.prediction:
            raise UsageError(
                f"{pair.reference[0]} has no prediction in {self.predictions}: predict it, or set "
                "missing_predictions=skip"
            )
        for files in (pair.prediction, pair.reference):
            if len(files) > 1:
                raise UsageError(f"several files with the same name: {', '.join(map(str, files))}")
        files = pair.prediction[0], pair.reference[0]
        (prediction, own), (reference, affine) = read_label_pair(*files)
        if prediction.shape != reference.shape:
            raise UsageError(
                f"{files[0]} has shape {list(prediction.shape)}, {files[1]} has "
                f"{list(reference.shape)}: {SAME_GRID}"
            )
        if not is_same_grid(own, affine):
            raise UsageError(
                f"{files[0]} has affine {own[:3].round(7).tolist()}, {files[1]} has "
                f"{affine[:3].round(7).tolist()}: {SAME_GRID}"
            )
        known = {} if self.names is None else self.names.classes
        names = {name.casefold(): labels for name, labels in known.items()}
        for file in files:
            if problem := find_other_name(read_header(file), names, "the evaluation"):
                raise UsageError(f"{file} {problem}: number the labels as the classes are")
        labels = self._find_labels(files[0], prediction) | self._find_labels(files[1], reference)
        if self.names is None:
            classes: Mapping[str, Sequence[int]] = {str(c): (c,) for c in sorted(labels - {0})}
        else:
            classes = self.names.classes
        unknown = dict.fromkeys(self.scores, np.nan)  # where the reference does not annotate
        return dict.fromkeys(classes, unknown) | score_case(
            prediction,
            reference,
            spacing_mm=get_spacing(affine, (0, 1, 2)),
            classes={name: c for name, c in classes.items() if name not in pair.unknown},
            tolerance_mm=self.tolerance_mm,
            ignore_labels=self.ignore_labels,
            metrics=self.metrics,
        )

    def _find_labels(self, file: Path, volume: np.ndarray) -> set[int]:
        """Return the labels of a volume; refuse labels that are not classes."""
        labels = set(find_labels(volume)) - {*self.ignore_labels}
        if self.names is None and len(labels) > MAX_LABELS:
            raise UsageError(
                f"{file} holds {len(labels)} different values: is it an image? If not, name its "
                "classes by classes= or checkpoint="
            )
        known = self.names.known_labels if self.names else None
        unknown = sorted(c for c in labels if c < 0 or (known is not None and c not in known))
        if unknown:
            listed = join_first(list(map(str, unknown)))
            expected = "0 or above" if known is None else join_first([*map(str, sorted(known))], 20)
            raise UsageError(
                f"{file}: labels must be {expected}, it holds {listed}: correct it, or name other "
                "labels by regions={NAME: [LABEL], ...}"
            )
        return labels


def run_evaluation(
    evaluation: Evaluation,
    *,
    on_case: Callable[[ScoredCase], None] = lambda case: None,
    warn: Callable[[str], None] = lambda line: None,
) -> EvaluationResult:
    """Score every case, write the files if there is a folder for them, and draw the worst cases."""
    folder = evaluation.output
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for warning in filter(None, (find_large_tolerance(evaluation), find_mixed_axes(evaluation))):
        warn(warning)
    scored = []
    for case in evaluation.score_all():
        scored.append(case)
        on_case(case)
    content = build_result(evaluation, scored)
    files = []
    if folder is not None:
        files = write_result(content, folder)
        draw_worst_cases(content, folder, warn)
        files += [folder / "worst"] if content["worst"] else []
        if evaluation.command is not None:
            files += try_write_evaluation_page(content, folder, evaluation.command, warn)
    parts = {key: content[key] for key in ("mean", "per_class", "cases", "errors")}
    return EvaluationResult(**parts, content=content, files=tuple(files))


def find_large_tolerance(evaluation: Evaluation) -> str | None:
    """Return a warning if the tolerance hides every error, as 1 mm does in microscopy."""
    tolerance = evaluation.tolerance_mm
    tolerances = tolerance.values() if isinstance(tolerance, Mapping) else [tolerance]
    pair = next((pair for pair in evaluation.pairs if pair.reference), None)
    if pair is None:
        return None
    file = pair.reference[0]
    try:
        headers = [read_header(part[0]) for part in (pair.reference, pair.prediction) if part]
    except UsageError:  # the case's own result says why
        return None
    header = next((header for header in headers if header.assumption is None), headers[0])
    size = float(np.linalg.norm(np.multiply(header.shape[:3], header.spacing_mm)))
    if max(tolerances) <= size / MIN_SIZE_RATIO:
        return None
    return (
        f"surface Dice accepts errors of {max(tolerances):g} mm, but {file.name} is {size:.2g} mm "
        "large: set a smaller tolerance_mm"
    )


def find_mixed_axes(evaluation: Evaluation) -> str | None:
    """Return a warning if predictions may be the references transposed."""
    found = (
        describe_mixed_axes(pair.prediction[0], pair.reference[0])
        for pair in evaluation.pairs
        if pair.prediction and pair.reference
    )
    mixed = next(filter(None, found), None)
    return mixed and f"{mixed}: scores are wrong if one is the other transposed"


def build_result(evaluation: Evaluation, scored: Sequence[ScoredCase]) -> dict[str, Any]:
    """Return the content of evaluation.json."""
    if evaluation.names is not None:
        classes = dict(evaluation.names.classes)
    else:
        labels = sorted({int(name) for case in scored for name in case.scores})
        classes = {str(label): (label,) for label in labels}
    # The scores of a class in a case that has no voxel of it.
    absent = {score: 0.0 if score.endswith("_ml") else np.nan for score in evaluation.scores}
    cases = {
        case.name: {name: case.scores.get(name, absent) for name in classes}
        for case in scored
        if case.error is None
    }
    tolerance, groups = evaluation.tolerance_mm, evaluation.groups
    if isinstance(tolerance, float):
        tolerance = dict.fromkeys(classes, tolerance)
    if groups is not None:
        groups = {name: groups[name] for name in cases}
    per_class, mean = summarize_scores(cases, list(classes), list(evaluation.scores), groups)
    return {
        "predictions": evaluation.predictions,
        "references": evaluation.references,
        "roles": evaluation.roles,
        "definitions": evaluation.scores | RULES | {"means": bootstrap.DEFINITION},
        "classes": classes,
        "ignore_labels": list(evaluation.ignore_labels),
        "tolerance_mm": tolerance,
        "groups": groups,
        "mean": mean,
        "per_class": per_class,
        "worst": list_worst_cases(evaluation, scored),
        "cases": cases,
        "errors": {case.name: case.error for case in scored if case.error is not None},
        "predictions_without_reference": list(evaluation.without_reference),
        "versions": collect_versions(),
    }


def summarize_scores(
    cases: Cases,
    classes: Sequence[str],
    scores: Sequence[str],
    groups: Mapping[str, str] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return means over the cases: by class and score, and over the classes by score."""
    if not cases or not classes:
        return {}, {}
    table = {
        score: np.array([[case[name][score] for name in classes] for case in cases.values()])
        for score in scores
    }
    per_class: dict[str, Any] = {name: {} for name in classes}
    overall = {}
    units = None if groups is None else list(groups.values())
    for score, values in table.items():  # (cases, classes)
        class_means, overall[score] = bootstrap.compute_bootstrap_means(values, units)
        for name, mean in zip(classes, class_means, strict=True):
            per_class[name][score] = mean
    present = np.add(table["reference_ml"] > 0, table["prediction_ml"] > 0, dtype=int)
    is_known = ~np.isnan(table["reference_ml"])
    for column, name in enumerate(classes):
        absent = present[is_known[:, column], column] == 0
        per_class[name]["absent_from_both"] = int(absent.sum())
        per_class[name]["absent_from_one"] = int((present[:, column] == 1).sum())
    return per_class, overall


def list_worst_cases(evaluation: Evaluation, scored: Sequence[ScoredCase]) -> list[dict[str, Any]]:
    """Return the cases with the lowest Dice: where their files are, and where they are drawn."""
    pairs = {pair.name: pair for pair in evaluation.pairs}
    ranked = sorted((case.dice, case.name) for case in scored if not np.isnan(case.dice))
    worst = []
    for rank, (dice, name) in enumerate(ranked[: evaluation.draw_worst], start=1):
        image = pairs[name].image or evaluation.images  # may be a folder
        files = {
            "prediction": str(pairs[name].prediction[0]),
            "reference": str(pairs[name].reference[0]),
            "image": None if image is None else str(image),
        }
        picture = f"worst/{rank}_{name}.png"
        worst.append({"case": name, "dice": dice, "picture": picture, "files": files})
    return worst


def write_result(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write evaluation.json, and evaluation.csv and .png if any case was scored."""
    report, table, boxes = (folder / f"evaluation.{suffix}" for suffix in ("json", "csv", "png"))
    write_report(result, report)
    if not result["per_class"]:
        for stale in (table, boxes):
            stale.unlink(missing_ok=True)  # an earlier evaluation wrote it
        return [report]
    write_csv(result["cases"], table)
    write_figure(plot_scores(result["cases"], result["classes"]), boxes)
    return [report, table, boxes]
