"""Score all cases of an evaluation, and write what was found: means, files, figures and a page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.evaluation.score_cases import CaseScores, Evaluation
from unet3d.metric import bootstrap
from unet3d.metric.scores import RULES
from unet3d.report import run_report
from unet3d.report.evaluation import Cases, plot_scores, write_csv
from unet3d.report.figures import save_png


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


def run_evaluation(
    evaluation: Evaluation,
    *,
    on_case: Callable[[CaseScores], None] = lambda case: None,
    warn: Callable[[str], None] = lambda line: None,
) -> EvaluationResult:
    """Score every case, write the files if there is a folder for them, and draw the worst cases."""
    folder = evaluation.output
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    scored = []
    for case in evaluation.score_all():
        scored.append(case)
        on_case(case)
    result = build_result(evaluation, scored)
    files = []
    if folder is not None:
        # What pictures and the page need is imported now, so that the command starts sooner.
        from unet3d.evaluation.page import draw_worst_cases, try_write_evaluation_page

        files = write_result(result, folder)
        draw_worst_cases(result, folder, warn)
        files += [folder / "worst"] if result["worst"] else []
        if evaluation.command is not None:
            files += try_write_evaluation_page(folder, evaluation.command, warn)
    return EvaluationResult(
        mean=result["mean"],
        per_class=result["per_class"],
        cases=result["cases"],
        errors=result["errors"],
        content=result,
        files=tuple(files),
    )


def build_result(evaluation: Evaluation, scored: Sequence[CaseScores]) -> dict[str, Any]:
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
    tolerance = evaluation.tolerance_mm
    groups = None
    if evaluation.groups is not None:
        groups = {name: evaluation.groups[name] for name in cases}
    per_class, mean = summarize_scores(cases, list(classes), list(evaluation.scores), groups)
    return {
        "predictions": evaluation.predictions,
        "references": evaluation.references,
        "roles": evaluation.roles,
        "definitions": evaluation.scores | RULES | {"means": bootstrap.DEFINITION},
        "classes": classes,
        "ignore_labels": list(evaluation.ignore_labels),
        "tolerance_mm": dict.fromkeys(classes, tolerance)
        if isinstance(tolerance, float)
        else tolerance,
        "groups": groups,
        "mean": mean,
        "per_class": per_class,
        "worst": list_worst_cases(evaluation, scored),
        "cases": cases,
        "errors": {case.name: case.error for case in scored if case.error is not None},
        "predictions_without_reference": list(evaluation.without_reference),
        "versions": run_report.collect_versions(),
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
    for score, values in table.items():  # (cases, classes)
        class_means, overall[score] = bootstrap.compute_bootstrap_means(
            values, None if groups is None else list(groups.values())
        )
        for name, mean in zip(classes, class_means, strict=True):
            per_class[name][score] = mean
    present = np.stack([table["reference_ml"] > 0, table["prediction_ml"] > 0]).sum(0)
    is_known = ~np.isnan(table["reference_ml"])
    for column, name in enumerate(classes):
        per_class[name]["absent_from_both"] = int((present == 0)[is_known[:, column], column].sum())
        per_class[name]["absent_from_one"] = int((present[:, column] == 1).sum())
    return per_class, overall


def list_worst_cases(evaluation: Evaluation, scored: Sequence[CaseScores]) -> list[dict[str, Any]]:
    """Return the cases with the lowest Dice: where their files are, and where they are drawn."""
    pairs = {pair.name: pair for pair in evaluation.pairs}
    ranked = sorted((case.dice, case.name) for case in scored if not np.isnan(case.dice))
    worst = []
    for rank, (dice, name) in enumerate(ranked[: evaluation.draw_worst], start=1):
        pair = pairs[name]
        image = pair.image or evaluation.images  # may be a folder
        files = {
            "prediction": str(pair.prediction[0]),
            "reference": str(pair.reference[0]),
            "image": None if image is None else str(image),
        }
        picture = f"worst/{rank}_{name}.png"
        worst.append({"case": name, "dice": dice, "picture": picture, "files": files})
    return worst


def write_result(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write evaluation.json, and evaluation.csv and .png if any case was scored."""
    report, table, boxes = (folder / f"evaluation.{suffix}" for suffix in ("json", "csv", "png"))
    run_report.write_report(result, report)
    if not result["per_class"]:
        for stale in (table, boxes):
            stale.unlink(missing_ok=True)  # of an earlier evaluation
        return [report]
    write_csv(result["cases"], table)
    save_png(plot_scores(result["cases"], result["classes"]), boxes)
    return [report, table, boxes]
