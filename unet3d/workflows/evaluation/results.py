"""Write what an evaluation found: means over the cases, files, and figures of the worst."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.labels import list_files_by_name
from unet3d.data.formats.volumes import is_volume, read_volume
from unet3d.data.preprocessing.resampling import find_orientation, get_spacing, reorient
from unet3d.errors import UsageError
from unet3d.metric import bootstrap
from unet3d.metric.scores import RULES, mask_ignored
from unet3d.report import run_report
from unet3d.report.case_figure import CaseFigure, draw_case_figure
from unet3d.report.evaluation import Cases, plot_scores, write_csv
from unet3d.report.figures import save_png
from unet3d.workflows.evaluation.score_cases import CaseScores, Evaluation

MAX_LEGEND_CLASSES = 12


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
        "worst": [
            {**entry, "files": list_files(evaluation, entry["case"])}
            for entry in rank_worst_cases(scored, evaluation.draw_worst)
        ],
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


def rank_worst_cases(scored: Sequence[CaseScores], count: int) -> list[dict[str, Any]]:
    """Return the cases with the lowest Dice."""
    ranked = sorted((case.dice, case.name) for case in scored if not np.isnan(case.dice))
    return [
        {
            "case": name,
            "dice": dice,
            "picture": f"worst/{rank}_{name}.png",
        }
        for rank, (dice, name) in enumerate(ranked[:count], start=1)
    ]


def list_files(evaluation: Evaluation, name: str) -> dict[str, str | None]:
    """Return where a case's prediction, reference and image are; the image may be a folder."""
    pair = next(pair for pair in evaluation.pairs if pair.name == name)
    image = pair.image or evaluation.images
    return {
        "prediction": str(pair.prediction[0]),
        "reference": str(pair.reference[0]),
        "image": None if image is None else str(image),
    }


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


def draw_worst_cases(
    evaluation: Evaluation, result: Mapping[str, Any], output: Path
) -> Iterator[str]:
    """Draw the worst cases; yield warnings."""
    folder = output / "worst"
    for stale in folder.glob("[0-9]*_*.png"):
        stale.unlink()  # of an earlier evaluation
    pairs = {pair.name: pair for pair in evaluation.pairs}
    for rank, entry in enumerate(result["worst"], start=1):
        folder.mkdir(exist_ok=True)
        name = entry["case"]
        prediction, reference, affine = evaluation.read_pair(*evaluation.get_files(pairs[name]))
        image, images = None, pairs[name].image or evaluation.images
        if images is not None:
            try:
                image = load_case_image(name, images, reference.shape)
            except UsageError as reason:
                yield f"{name} is drawn without its image: {reason}"
        prediction, reference = mask_ignored(prediction, reference, evaluation.ignore_labels)
        axes, flips = find_orientation(affine, "RAS")
        draw_case_figure(
            CaseFigure(
                reference=reorient(reference, axes, flips),
                prediction=reorient(prediction, axes, flips),
                image=None if image is None else reorient(image, axes, flips),
                spacing_mm=get_spacing(affine, axes),
                classes=result["classes"],
            ),
            output / entry["picture"],
            title=f"{name}: Dice {entry['dice']:.4f}, worst {rank} of {len(result['cases'])}",
            legend=make_legend(result["cases"][name]),
        )


def make_legend(case: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return the legend of a case by class, the worst classes first."""
    present = [name for name, scores in case.items() if not np.isnan(scores["dice"])]
    legend = {}
    for name in sorted(present, key=lambda name: case[name]["dice"])[:MAX_LEGEND_CLASSES]:
        scores = case[name]
        legend[name] = f"Dice {scores['dice']:.4f}, HD95 {scores['hd95_mm']:.2f} mm"
        if not scores["reference_ml"]:
            legend[name] = "not in the reference"
        elif not scores["prediction_ml"]:
            legend[name] = "not predicted"
    return legend


def load_case_image(name: str, images: Path, shape: Sequence[int]) -> np.ndarray:
    """Return the first channel of a case's image."""
    if images.is_dir() and not is_volume(images):
        files = list_files_by_name(images)
        candidates = files.get(name) or files.get(f"{name}_0000")
        if not candidates:
            raise UsageError(f"{images} has no volume named {name} or {name}_0000")
        images = candidates[0]
    image = read_volume(images)[0][0]
    if image.shape != tuple(shape):
        raise UsageError(f"{images} has shape {list(image.shape)}, its labels {list(shape)}")
    return image
