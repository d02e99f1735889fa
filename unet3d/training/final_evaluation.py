"""Evaluate the best checkpoint of a run on its validation cases, and choose its postprocessing."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.checkpoint_file import update_metadata
from unet3d.control_groups import count_usable_cores
from unet3d.data.formats.volumes import read_label_pair, write_labels
from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.loading.datasets import CachedVolume
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError, summarize_error
from unet3d.evaluation.evaluate import CasePair, Evaluation, run_evaluation
from unet3d.evaluation.options import build_metrics, name_labels, select_class_metrics
from unet3d.inference.ensemble import Ensemble, load_ensemble
from unet3d.inference.postprocess import keep_largest_component
from unet3d.inference.predictor import Predictor
from unet3d.inference.tasks import ScanTask
from unet3d.text import join_first, pluralize
from unet3d.training.run import TrainingRun
from unet3d.training.run_folder import Log
from unet3d.types import get_ignore_label

MIN_SHARE = 0.99
"""Share of a class in its largest component in every label; stray voxels are common in labels."""

MIN_CASES = 5
"""Training cases that must have a class; in fewer, a second component would often be missed."""


def evaluate_best_checkpoint(run: TrainingRun, log: Log) -> dict[str, Any]:
    """Score the validation cases in the grids of their files; return parts of the report.

    Predictions are written to validation/, scores to evaluation/. Classes that are one component in
    the training labels, and do not score lower with only their largest component, are recorded in
    the checkpoints, where predict finds them.
    """
    patterns = ("best.ckpt", "last.ckpt", "best-step=*.ckpt")
    checkpoints = [path for p in patterns for path in run.folder.glob(f"checkpoints/{p}")]
    volumes, folder = run.data.validation, run.folder / "validation"
    single, evidence = [], "regions overlap: none is reduced to its largest component"
    if not run.data.dataset.regions:
        log(f"looking for classes of one component in {pluralize(len(run.data.training), 'label')}")
        single, evidence = find_single_components(run)
    names = run.data.dataset.classes
    if not volumes:
        chosen = [names[label] for label in single]
        return {"postprocessing": record_postprocessing(chosen, evidence, checkpoints, log)}
    ensemble = load_ensemble(checkpoints[:1], allow_targets=None)
    if ensemble.uses_tta != run.settings.evaluation.tta:  # a resumed run may change it
        for path in checkpoints:
            update_metadata(path, {"tta": run.settings.evaluation.tta})
    log(f"evaluating {len(volumes)} validation cases with {checkpoints[0].name}")
    folder.mkdir(exist_ok=True)
    failures = predict_cases(run, ensemble, folder, log)
    found = choose_postprocessing(volumes, single, folder, run.data.preprocessing)
    chosen = [names[label] for label in found]
    if not run.data.dataset.regions:
        evidence += f"; Dice on {pluralize(len(volumes), 'validation case')} is not lower"
    postprocessing = record_postprocessing(chosen, evidence, checkpoints, log)
    warnings: list[str] = []
    result = run_evaluation(_build_evaluation(run, ensemble, folder), warn=warnings.append)
    for name, reason in result.errors.items():
        log(f"{name} is not scored: {reason}")
    dice = run.callbacks.training_warnings.dice
    is_best = checkpoints[0].stem == "best"
    evaluation = {
        "checkpoint": str(checkpoints[0]),
        "best_of": sum(value == value for value in dice) if is_best else None,
        "mean": result.mean,
        "per_class": result.per_class,
        "errors": {**failures, **result.errors},
    }
    return {"evaluation": evaluation, "postprocessing": postprocessing, "warnings": warnings}


def predict_cases(run: TrainingRun, ensemble: Ensemble, folder: Path, log: Log) -> dict[str, str]:
    """Write the labels of the validation cases; return why a case has none, by its name."""
    windows = run.settings.step.windows
    predictor = Predictor(
        ensemble,
        device=run.data.device,
        precision=run.precision,
        overlap=windows.overlap,
        batch_size=windows.batch_size,
        flip_axes=(ensemble.mirroring_axes or ()) if run.settings.evaluation.tta else (),
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
            log(f"{volume.name} is not evaluated: {failures[volume.name]}")
    return failures


def _build_evaluation(run: TrainingRun, ensemble: Ensemble, folder: Path) -> Evaluation:
    """Pair the predictions with their references, as `unet3d evaluate` would match them."""
    annotations, ignored = run.data.dataset.annotations, run.data.dataset.ignore_labels
    pairs = [
        CasePair(
            name=volume.name,
            prediction=[folder / f"{volume.name}.nii.gz"],
            reference=[volume.case.label],
            image=volume.case.images[0],
            unknown=frozenset(annotations.find_unannotated(volume.name) if annotations else ()),
        )
        for volume in run.data.validation
        if (folder / f"{volume.name}.nii.gz").exists()
    ]
    return Evaluation(
        predictions=str(folder),
        references="of the validation cases",
        output=run.folder / "evaluation",
        draw_worst=run.settings.evaluation.draw_worst,
        pairs=pairs,
        names=name_labels(
            ensemble.classes, ensemble.regions, ignored, run.data.dataset.label_values
        ),
        ignore_labels=ignored,
        groups=run.data.groups,
        tolerance_mm=run.settings.evaluation.tolerance_mm,
        roles={"validation": [pair.name for pair in pairs]},
        metrics=select_class_metrics(build_metrics(run.settings.metrics, ensemble.regions)),
    )


def find_single_components(run: TrainingRun) -> tuple[list[int], str]:
    """Return labels of which nearly all is one component wherever the training cases have them.

    Also describe the evidence. A label is given up at the first case that speaks against it, so
    that lesions cost little time.
    """
    classes, volumes = run.data.dataset.classes, run.data.training
    cases = dict.fromkeys(range(1, len(classes)), 0)

    def measure(volume: CachedVolume) -> dict[int, tuple[int, float]]:
        left = list(cases)  # labels that no case has spoken against so far
        if not left or volume.has_ignored:  # other components may not be annotated
            return {}
        cleaned = np.array(volume.label)
        sizes = np.bincount(cleaned.ravel(), minlength=len(classes)).tolist()
        removed = keep_largest_component(cleaned, left)
        return {label: (sizes[label], 1 - removed.get(label, 0.0)) for label in left}

    with ThreadPoolExecutor(count_usable_cores()) as pool:
        for shares in pool.map(measure, volumes):
            for label, (size, share) in shares.items():
                if label in cases:
                    cases[label] += bool(size)
                    if share < MIN_SHARE:
                        del cases[label]
    cases = {label: count for label, count in cases.items() if count >= MIN_CASES}
    counts = join_first([f"{classes[label]} {count}" for label, count in cases.items()])
    return list(cases), (
        f"{pluralize(len(volumes), 'training label')}: in every case with the class, one component "
        f"holds at least {MIN_SHARE:.0%} of its voxels ({counts or f'at least {MIN_CASES} cases'})"
    )


def record_postprocessing(
    classes: list[str], evidence: str, checkpoints: Sequence[Path], log: Log
) -> dict[str, Any]:
    """Record in the checkpoints which classes keep only their largest component; say why."""
    for path in checkpoints if classes else []:
        update_metadata(path, {"keep_largest_component": classes})
    kept = (
        f"the largest component alone of {join_first(classes, 20)}" if classes else "all components"
    )
    log(f"predictions keep {kept} (report.json says why)")
    return {"largest_component": classes, "evidence": evidence}


def choose_postprocessing(
    volumes: Sequence[CachedVolume],
    labels: Sequence[int],
    folder: Path,
    preprocessing: Preprocessing,
) -> list[int]:
    """Return labels whose mean Dice is not lower with only the largest component; clean the files.

    A gain on a few cases alone is no evidence: it may delete true second lesions. A class of
    which the network finds nothing gives no evidence either.
    """

    def compute_dice(prediction: np.ndarray, reference: np.ndarray, label: int) -> float:
        p, r = prediction == label, reference == label
        total = int(p.sum()) + int(r.sum())
        return 2 * int((p & r).sum()) / total if total else 1.0  # nothing can be gained

    files = partial(iter_predictions, volumes, folder, preprocessing)
    gains, found = dict.fromkeys(labels, 0.0), set[int]()
    for prediction, reference, _ in files() if labels else ():
        cleaned = prediction.copy()
        keep_largest_component(cleaned, labels)
        found |= set(prediction[prediction == reference].tolist())
        scored = reference != get_ignore_label(reference)
        voxels, reference = [p[scored] for p in (prediction, cleaned)], reference[scored]
        for label in labels:
            before, after = (compute_dice(p, reference, label) for p in voxels)
            gains[label] += after - before
    chosen = [label for label in labels if gains[label] >= 0 and label in found]
    for prediction, _, path in files() if chosen else ():
        keep_largest_component(prediction, chosen)
        write_labels(path, prediction, path, values=preprocessing.label_values)
    return chosen


def iter_predictions(
    volumes: Sequence[CachedVolume], folder: Path, preprocessing: Preprocessing
) -> Iterator[tuple[np.ndarray, np.ndarray, Path]]:
    """Yield the classes of prediction and reference, and the prediction's file, case by case."""
    for volume in volumes:
        path = folder / f"{volume.name}.nii.gz"
        if path.exists():
            try:
                (prediction, _), (reference, _) = read_label_pair(path, volume.case.label)
            except (UsageError, OSError):
                continue  # the evaluation says why
            prediction, reference = map(preprocessing.to_classes, (prediction, reference))
            yield prediction, reference, path
