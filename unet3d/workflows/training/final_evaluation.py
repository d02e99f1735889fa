"""After the last step: the best checkpoint on validation cases, as predict and evaluate do."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.layouts.label_names import LabelNames
from unet3d.data.layouts.unlabelled import ScanFiles
from unet3d.data.nifti.labels import read_labels
from unet3d.data.nifti.writer import write_labels
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.errors import DoesNotFitError
from unet3d.inference.postprocess import keep_largest_component
from unet3d.lit.callbacks.checkpoints import update_metadata
from unet3d.workflows.evaluation.results import build_result, draw_worst_cases, write_result
from unet3d.workflows.evaluation.score_cases import CasePair, Evaluation
from unet3d.workflows.inference.ensemble import Ensemble, load_ensemble
from unet3d.workflows.inference.predictor import Predictor, ScanTask
from unet3d.workflows.training.build import TrainingRun


def evaluate_best_checkpoint(run: TrainingRun, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Scores of the validation cases in the grid of their files; None if there are none.

    Predictions are left in validation/, scores in evaluation/; which classes are better off with
    their largest piece alone goes into the checkpoints, where predict finds it.
    """
    if not run.validation:
        return None
    names = [run.folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")]
    checkpoints = [path for path in names if path.exists()]
    say(f"evaluating {len(run.validation)} validation cases with {checkpoints[0].name}")
    members = load_ensemble(checkpoints[:1], run.config["allow_targets"])
    folder = run.folder / "validation"
    folder.mkdir(exist_ok=True)
    predictor = Predictor(
        members,
        device=run.trainer.strategy.root_device,
        used=run.precision,
        kept=(),
        ram=None,
        mirror=(),
        **run.config["inference"],
    )
    tasks = [
        ScanTask(
            scan=ScanFiles(name=volume.name, files=volume.case.images),
            labels=folder / f"{volume.name}.nii.gz",
            probabilities=None,
        )
        for volume in run.validation
    ]
    for task in tasks:
        try:
            predictor.predict(predictor.prepare(task), told=lambda windows: None, say=say)
        except DoesNotFitError as reason:
            say(f"{task.scan.name} is not evaluated: {reason}")
    classes = [] if members.regions else range(1, len(members.classes))
    kept = choose_postprocessing(run.validation, classes, folder)
    for path in checkpoints if kept else []:
        update_metadata(path, {"largest_component": [members.classes[c] for c in kept]})
    evaluation = build_evaluation(run, members, folder)
    evaluation.output.mkdir(exist_ok=True)
    found = build_result(evaluation, list(evaluation.score_all()))
    write_result(found, evaluation.output)
    for line in draw_worst_cases(evaluation, found):
        say(line)
    return {
        "checkpoint": str(checkpoints[0]),
        "largest_component": [members.classes[c] for c in kept],
        "mean": found["mean"],
        "per_class": found["per_class"],
        "faults": found["faults"],
    }


def choose_postprocessing(
    volumes: Sequence[CachedVolume], classes: Sequence[int], folder: Path
) -> list[int]:
    """Classes whose mean Dice is higher with the largest piece alone; the files are cleaned."""
    gains = dict.fromkeys(classes, 0.0)
    for prediction, reference, _ in iter_predictions(volumes, folder):
        for c in classes:
            cleaned = prediction.copy()
            keep_largest_component(cleaned, [c])
            gains[c] += dice(cleaned, reference, c) - dice(prediction, reference, c)
    kept = [c for c in classes if gains[c] > 0]
    if kept:
        for prediction, _, path in iter_predictions(volumes, folder):
            keep_largest_component(prediction, kept)
            write_labels(path, prediction, path)
    return kept


def iter_predictions(
    volumes: Sequence[CachedVolume], folder: Path
) -> Iterator[tuple[np.ndarray, np.ndarray, Path]]:
    """Prediction, reference and the prediction's file, case by case."""
    for volume in volumes:
        path = folder / f"{volume.name}.nii.gz"
        if path.exists():
            prediction = read_labels(path)[0].astype(np.uint8)
            yield prediction, read_labels(volume.case.label)[0], path


def dice(prediction: np.ndarray, reference: np.ndarray, c: int) -> float:
    """Of one class; 1 if neither has it, since there is nothing to gain then."""
    p, r = prediction == c, reference == c
    both = int(p.sum()) + int(r.sum())
    return 2 * int((p & r).sum()) / both if both else 1.0


def build_evaluation(run: TrainingRun, members: Ensemble, folder: Path) -> Evaluation:
    """The predictions beside their references, as `unet3d evaluate` would match them."""
    data, choice = run.config["data"], run.config["evaluation"]
    classes = {name: (c,) for c, name in enumerate(members.classes) if c > 0}
    regions = {k: tuple(v) for k, v in (members.regions or {}).items()}
    pairs = [
        CasePair(
            name=volume.name,
            prediction=[folder / f"{volume.name}.nii.gz"],
            reference=[volume.case.label],
            image=volume.case.images[0],
        )
        for volume in run.validation
        if (folder / f"{volume.name}.nii.gz").exists()
    ]
    return Evaluation(
        config={
            "predictions": str(folder),
            "references": "of the validation cases",
            "output": str(run.folder / "evaluation"),
            "images": None,
            "draw_worst": choice["draw_worst"],
            "workers": 1,
        },
        pairs=pairs,
        without_reference=[],
        names=LabelNames(
            classes=regions or classes,
            known=frozenset(range(data["num_classes"])),
            ignore_label=data["ignore_label"],
        ),
        ignore_label=data["ignore_label"],
        tolerance_mm=choice["tolerance_mm"],
    )
