"""What an evaluation leaves behind: means over the cases, files, and pictures of the worst."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.nifti.labels import files_by_name
from unet3d.data.nifti.reader import read_volume
from unet3d.data.preprocessing.resampling import orientation, reorient, spacing
from unet3d.errors import UsageError
from unet3d.metric import bootstrap
from unet3d.metric.scores import RULES, SCORES, mask_ignored
from unet3d.report import run_report
from unet3d.report.case_figure import CaseFigure, draw_case
from unet3d.report.evaluation import Cases, draw_boxes, write_csv
from unet3d.workflows.evaluation.score_cases import CaseScores, Evaluation

ABSENT = {score: 0.0 if score.endswith("_ml") else np.nan for score in SCORES}
"""The scores of a class in a case that has no voxel of it."""

LEGEND = 12
"""A picture has room to speak of so many classes."""


def build_result(evaluation: Evaluation, judged: Sequence[CaseScores]) -> dict[str, Any]:
    """All that evaluation.json says."""
    if evaluation.names is not None:
        classes = dict(evaluation.names.classes)
    else:
        classes = {str(c): (c,) for c in sorted({int(name) for j in judged for name in j.scores})}
    cases = {
        j.name: {name: j.scores.get(name, ABSENT) for name in classes}
        for j in judged
        if j.fault is None
    }
    tolerance = evaluation.tolerance_mm
    per_class, overall = summarize_scores(cases, list(classes))
    return {
        "predictions": evaluation.config["predictions"],
        "references": evaluation.config["references"],
        "definitions": SCORES | RULES | {"means": bootstrap.DEFINITION},
        "classes": classes,
        "ignore_label": evaluation.ignore_label,
        "tolerance_mm": dict.fromkeys(classes, tolerance)
        if isinstance(tolerance, float)
        else tolerance,
        "mean": overall,
        "per_class": per_class,
        "worst": rank_worst_cases(judged, evaluation.config["draw_worst"]),
        "cases": cases,
        "faults": {j.name: j.fault for j in judged if j.fault is not None},
        "predictions_without_reference": list(evaluation.without_reference),
        "versions": run_report.collect_versions(),
    }


def summarize_scores(cases: Cases, classes: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Means over the cases: by class and score, and over the classes by score."""
    if not cases or not classes:
        return {}, {}
    table = {
        score: np.array([[case[name][score] for name in classes] for case in cases.values()])
        for score in SCORES
    }
    per_class: dict[str, Any] = {name: {} for name in classes}
    overall = {}
    for score, values in table.items():  # (cases, classes)
        of_classes, overall[score] = bootstrap.bootstrap_means(values)
        for name, found in zip(classes, of_classes, strict=True):
            per_class[name][score] = found
    there = np.stack([table["reference_ml"] > 0, table["prediction_ml"] > 0]).sum(0)
    for column, name in enumerate(classes):
        per_class[name]["absent_from_both"] = int((there[:, column] == 0).sum())
        per_class[name]["absent_from_one"] = int((there[:, column] == 1).sum())
    return per_class, overall


def rank_worst_cases(judged: Sequence[CaseScores], most: int) -> list[dict[str, Any]]:
    """The cases with the lowest Dice."""
    ranked = sorted((j.dice, j.name) for j in judged if not np.isnan(j.dice))
    return [
        {"case": name, "dice": dice, "picture": f"worst/{rank}_{name}.png"}
        for rank, (dice, name) in enumerate(ranked[:most], start=1)
    ]


def write_result(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """evaluation.json, evaluation.csv and evaluation.png, as far as there is something in them."""
    whole, table, boxes = (folder / f"evaluation.{suffix}" for suffix in ("json", "csv", "png"))
    run_report.write_report(found, whole)
    if not found["per_class"]:
        for earlier in (table, boxes):
            earlier.unlink(missing_ok=True)  # another evaluation's
        return [whole]
    write_csv(found["cases"], table)
    draw_boxes(found["cases"], found["classes"], boxes)
    return [whole, table, boxes]


def draw_worst_cases(evaluation: Evaluation, found: Mapping[str, Any]) -> Iterator[str]:
    """Draw the worst cases; yields what to say of it."""
    folder = evaluation.output / "worst"
    for earlier in folder.glob("[0-9]*_*.png"):
        earlier.unlink()  # another evaluation's
    pairs = {pair.name: pair for pair in evaluation.pairs}
    for rank, entry in enumerate(found["worst"], start=1):
        folder.mkdir(exist_ok=True)
        name = entry["case"]
        prediction, reference, affine = evaluation.read_pair(pairs[name])
        image, images = None, pairs[name].image or evaluation.config["images"]
        if images is not None:
            try:
                image = load_case_image(name, Path(images), reference.shape)
            except UsageError as reason:
                yield f"{name} is drawn without its image: {reason}"
        prediction, reference = mask_ignored(prediction, reference, evaluation.ignore_label)
        axes, flips = orientation(affine, "RAS")
        draw_case(
            CaseFigure(
                reference=reorient(reference, axes, flips),
                prediction=reorient(prediction, axes, flips),
                image=None if image is None else reorient(image, axes, flips),
                spacing_mm=spacing(affine, axes),
                classes=found["classes"],
            ),
            evaluation.output / entry["picture"],
            title=f"{name}: Dice {entry['dice']:.4f}, worst {rank} of {len(found['cases'])}",
            legend=legend(found["cases"][name]),
        )


def legend(case: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """What a picture says of the classes of a case; of many, of the worst."""
    there = [name for name, scores in case.items() if not np.isnan(scores["dice"])]
    said = {}
    for name in sorted(there, key=lambda name: case[name]["dice"])[:LEGEND]:
        scores = case[name]
        said[name] = f"Dice {scores['dice']:.4f}, HD95 {scores['hd95_mm']:.2f} mm"
        if not scores["reference_ml"]:
            said[name] = "not in the reference"
        elif not scores["prediction_ml"]:
            said[name] = "not predicted"
    return said


def load_case_image(name: str, images: Path, shape: Sequence[int]) -> np.ndarray:
    """The image of a case, of several channels the first."""
    if images.is_dir():
        files = files_by_name(images)
        given = files.get(name) or files.get(f"{name}_0000")
        if not given:
            raise UsageError(f"{images} has neither {name}.nii.gz nor {name}_0000.nii.gz")
        images = given[0]
    image = read_volume(images)[0][0]
    if image.shape != tuple(shape):
        raise UsageError(f"{images} has shape {list(image.shape)} and its labels {list(shape)}")
    return image
