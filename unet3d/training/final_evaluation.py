"""Evaluate the best checkpoint on the validation cases when training ends."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.checkpoint_file import update_metadata
from unet3d.data.formats.labels import read_label_pair
from unet3d.data.formats.volumes import write_labels
from unet3d.data.layouts.label_names import LabelNames
from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.loading.datasets import CachedVolume
from unet3d.errors import UsageError, summarize_error
from unet3d.evaluation.evaluate import CasePair, Evaluation, run_evaluation
from unet3d.evaluation.options import build_metrics, select_class_metrics
from unet3d.inference.ensemble import Ensemble, load_ensemble
from unet3d.inference.postprocess import keep_largest_component
from unet3d.inference.predictor import Predictor, ScanTask
from unet3d.text import escape_unprintable, pluralize
from unet3d.training.run import TrainingRun

MIN_SHARE = 0.99
"""Share of a class in its largest component in every label; stray voxels are common in labels."""

MIN_CASES = 5
"""Training cases that must have a class; in fewer, a second component would often be missed."""


def evaluate_best_checkpoint(run: TrainingRun, log: Callable[[str], None]) -> dict[str, Any]:
    """Score the validation cases in the grids of their files; return parts of the report.

    Predictions are written to validation/, scores to evaluation/. Classes that score higher with
    only their largest component are recorded in the checkpoints, where predict finds them; without
    validation cases, classes that are one component in the training labels.
    """
    names = [run.folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")]
    checkpoints = [path for path in names if path.exists()]
    if not run.data.validation:
        return {"postprocessing": derive_postprocessing(run, checkpoints, log)}
    ensemble = load_ensemble(checkpoints[:1], allow_targets=None)
    log(f"evaluating {len(run.data.validation)} validation cases with {checkpoints[0].name}")
    folder = run.folder / "validation"
    folder.mkdir(exist_ok=True)
    windows = run.settings.step.windows
    predictor = Predictor(
        ensemble,
        device=run.device,
        precision=run.precision,
        overlap=windows.overlap,
        batch_size=windows.batch_size,
    )
    failures: dict[str, str] = {}
    for volume in run.data.validation:
        task = ScanTask(
            scan=ScanFiles(name=volume.name, files=volume.case.images),
            labels=folder / f"{volume.name}.nii.gz",
            probabilities=None,
        )
        try:
            predictor.compute(predictor.prepare(task), log=log)()
        except Exception as error:  # a case that vanished or does not fit costs that case alone
            failures[volume.name] = summarize_error(error)
            task.labels.unlink(missing_ok=True)  # of an earlier evaluation
            log(escape_unprintable(f"{volume.name} is not evaluated: {failures[volume.name]}"))
    labels = [] if ensemble.regions else range(1, len(ensemble.classes))
    cleaned = choose_postprocessing(run.data.validation, labels, folder)
    cleaned_classes = [ensemble.classes[label] for label in cleaned]
    evidence = f"Dice on {pluralize(len(run.data.validation), 'validation case')}"
    postprocessing = record_postprocessing(cleaned_classes, evidence, checkpoints, log)
    result = run_evaluation(_build_evaluation(run, ensemble, folder), warn=log)
    for name, reason in result.errors.items():
        log(escape_unprintable(f"{name} is not scored: {reason}"))
    is_best = checkpoints[0].stem == "best"
    dice = run.callbacks.training_warnings.dice
    evaluation = {
        "checkpoint": str(checkpoints[0]),
        "best_of": sum(value == value for value in dice) if is_best else None,
        "mean": result.mean,
        "per_class": result.per_class,
        "errors": {**failures, **result.errors},
    }
    return {"evaluation": evaluation, "postprocessing": postprocessing}


def derive_postprocessing(
    run: TrainingRun, checkpoints: Sequence[Path], log: Callable[[str], None]
) -> dict[str, Any]:
    """Choose the classes of which nearly all is one component wherever the training cases have it.

    A class is given up at the first case that speaks against it, so that lesions cost little time.
    """
    classes, volumes = run.dataset.classes, run.data.training
    cases = {} if run.dataset.regions else dict.fromkeys(range(1, len(classes)), 0)
    for volume in volumes:
        if not cases:
            break
        labels = volume.label
        cleaned = np.array(labels)
        keep_largest_component(cleaned, list(cases))
        for label in list(cases):
            size, kept = (np.count_nonzero(array == label) for array in (labels, cleaned))
            cases[label] += bool(size)
            if kept < MIN_SHARE * size:
                del cases[label]
    chosen = {classes[label]: count for label, count in cases.items() if count >= MIN_CASES}
    counts = ", ".join(f"{name} {count}" for name, count in chosen.items())
    evidence = (
        f"{pluralize(len(volumes), 'training label')}: at least {MIN_SHARE:.0%} of the class is "
        f"one component in all that have it ({counts or f'at least {MIN_CASES}'})"
    )
    return record_postprocessing(list(chosen), evidence, checkpoints, log)


def record_postprocessing(
    classes: list[str], evidence: str, checkpoints: Sequence[Path], log: Callable[[str], None]
) -> dict[str, Any]:
    """Record in the checkpoints which classes keep only their largest component; say why."""
    for path in checkpoints if classes else []:
        update_metadata(path, {"keep_largest_component": classes})
    names = ", ".join(classes) or "no class"
    log(escape_unprintable(f"keeping only the largest component of {names}, judged by {evidence}"))
    return {"largest_component": classes, "evidence": evidence}


def choose_postprocessing(
    volumes: Sequence[CachedVolume], labels: Sequence[int], folder: Path
) -> list[int]:
    """Return labels whose mean Dice is higher with only the largest component; clean the files."""
    gains = dict.fromkeys(labels, 0.0)
    for prediction, reference, _ in iter_predictions(volumes, folder):
        for label in labels:
            cleaned = prediction.copy()
            keep_largest_component(cleaned, [label])
            before, after = (_dice(p, reference, label) for p in (prediction, cleaned))
            gains[label] += after - before
    chosen = [label for label in labels if gains[label] > 0]
    if chosen:
        for prediction, _, path in iter_predictions(volumes, folder):
            keep_largest_component(prediction, chosen)
            write_labels(path, prediction, path)
    return chosen


def iter_predictions(
    volumes: Sequence[CachedVolume], folder: Path
) -> Iterator[tuple[np.ndarray, np.ndarray, Path]]:
    """Yield prediction, reference and the prediction's file, case by case."""
    for volume in volumes:
        path = folder / f"{volume.name}.nii.gz"
        if path.exists():
            try:
                (prediction, _), (reference, _) = read_label_pair(path, volume.case.label)
            except (UsageError, OSError):
                continue  # the evaluation says why
            yield prediction.astype(np.uint8), reference, path


def _dice(prediction: np.ndarray, reference: np.ndarray, label: int) -> float:
    """Return one label's Dice; 1 if neither has it, since nothing can be gained then."""
    p, r = prediction == label, reference == label
    total = int(p.sum()) + int(r.sum())
    return 2 * int((p & r).sum()) / total if total else 1.0


def _build_evaluation(run: TrainingRun, ensemble: Ensemble, folder: Path) -> Evaluation:
    """Pair the predictions with their references, as `unet3d evaluate` would match them."""
    classes = {name: (label,) for label, name in enumerate(ensemble.classes) if label > 0}
    regions = {name: tuple(labels) for name, labels in (ensemble.regions or {}).items()}
    annotations = run.dataset.annotations
    pairs = [
        CasePair(
            name=volume.name,
            prediction=[folder / f"{volume.name}.nii.gz"],
            reference=[volume.case.label],
            image=volume.case.images[0],
            unknown=frozenset()
            if annotations is None
            else frozenset(annotations.find_unknown(volume.name)),
        )
        for volume in run.data.validation
        if (folder / f"{volume.name}.nii.gz").exists()
    ]
    return Evaluation(
        predictions=str(folder),
        references="of the validation cases",
        output=run.folder / "evaluation",
        images=None,
        draw_worst=run.settings.evaluation.draw_worst,
        workers=1,
        pairs=pairs,
        without_reference=[],
        names=LabelNames(
            classes=regions or classes,
            known_labels=frozenset(range(len(ensemble.classes))),
            ignore_labels=run.dataset.ignore_labels,
        ),
        ignore_labels=run.dataset.ignore_labels,
        groups=run.data.groups,
        tolerance_mm=run.settings.evaluation.tolerance_mm,
        roles={"validation": [pair.name for pair in pairs]},
        metrics=select_class_metrics(build_metrics(run.settings.metrics, ensemble.regions)),
    )
