"""Choose the classes of which predictions keep only the largest component."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.checkpoint_file import update_metadata
from unet3d.control_groups import count_usable_cores
from unet3d.data.formats.volumes import read_label_pair, write_labels
from unet3d.data.loading.datasets import CachedVolume
from unet3d.errors import UsageError
from unet3d.inference.postprocess import keep_largest_component
from unet3d.text import pluralize
from unet3d.training.run import TrainingRun
from unet3d.training.run_folder import Log

MIN_SHARE = 0.99
"""Share of a class in its largest component in every label; stray voxels are common in labels."""

MIN_CASES = 5
"""Training cases that must have a class; in fewer, a second component would often be missed."""


def find_single_components(run: TrainingRun) -> tuple[list[int], str]:
    """Return labels of which nearly all is one component wherever the training cases have them.

    Also describe the evidence. A label is given up at the first case that speaks against it, so
    that lesions cost little time.
    """
    classes, volumes = run.data.dataset.classes, run.data.training
    cases = {} if run.data.dataset.regions else dict.fromkeys(range(1, len(classes)), 0)

    def measure(volume: CachedVolume) -> dict[int, tuple[int, float]]:
        left = list(cases)  # labels that no case has spoken against so far
        if not left:
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
    counts = ", ".join(f"{classes[label]} {count}" for label, count in cases.items())
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
    kept = f"the largest component alone of {', '.join(classes)}" if classes else "all components"
    log(f"predictions keep {kept} (report.json says why)")
    return {"largest_component": classes, "evidence": evidence}


def choose_postprocessing(
    volumes: Sequence[CachedVolume], labels: Sequence[int], folder: Path
) -> list[int]:
    """Return labels whose mean Dice is not lower with only the largest component; clean the files.

    A gain on a few cases alone is no evidence: it may delete true second lesions. A class of
    which the network finds nothing gives no evidence either.
    """

    def compute_dice(prediction: np.ndarray, reference: np.ndarray, label: int) -> float:
        p, r = prediction == label, reference == label
        total = int(p.sum()) + int(r.sum())
        return 2 * int((p & r).sum()) / total if total else 1.0  # nothing can be gained

    gains, found = dict.fromkeys(labels, 0.0), set[int]()
    for prediction, reference, _ in iter_predictions(volumes, folder) if labels else ():
        cleaned = prediction.copy()
        keep_largest_component(cleaned, labels)
        found |= set(prediction[prediction == reference].tolist())
        for label in labels:
            before, after = (compute_dice(p, reference, label) for p in (prediction, cleaned))
            gains[label] += after - before
    chosen = [label for label in labels if gains[label] >= 0 and label in found]
    for prediction, _, path in iter_predictions(volumes, folder) if chosen else ():
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
