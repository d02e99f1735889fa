"""Score every case of an evaluation; a case that cannot be scored is an error of its own."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unet3d.data.formats.volumes import read_label_pair
from unet3d.data.layouts.dataset_json import LabelNames
from unet3d.data.preprocessing.channels import get_spacing
from unet3d.errors import UsageError
from unet3d.metric.scores import SCORES, ClassMetric, find_labels, score_case

AFFINE_TOLERANCE_MM = 1e-3
"""Affines that differ by more than this are different grids."""

SAME_GRID = "both must be on the same voxel grid; resample the prediction to the reference's grid"

MAX_LABELS = 255
"""A file with more different labels than this, none of them named, is taken for an image."""


@dataclass(frozen=True, kw_only=True)
class CasePair:
    """The files of one case: normally one each."""

    name: str
    prediction: Sequence[Path]  # none: missing; several: ambiguous
    reference: Sequence[Path]
    image: Path | None = None  # what it is drawn over
    unknown: frozenset[str] = frozenset()  # classes that the reference does not annotate


@dataclass(frozen=True, kw_only=True)
class CaseScores:
    """One case's scores by class, or why there are none."""

    name: str
    scores: Mapping[str, Mapping[str, float]]
    error: str | None = None

    @property
    def dice(self) -> float:
        """Return the mean over the classes that the case has; NaN if it has none."""
        values = [s["dice"] for s in self.scores.values() if not np.isnan(s["dice"])]
        return sum(values) / len(values) if values else np.nan


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is compared with what, and how."""

    predictions: str  # where they are, for the record
    references: str
    output: Path | None  # None: no files are written
    images: Path | None
    draw_worst: int
    workers: int
    pairs: Sequence[CasePair]
    without_reference: Sequence[str]
    names: LabelNames | None  # None: every label is a class
    ignore_labels: tuple[int, ...]
    tolerance_mm: float | Mapping[str, float]
    metrics: Sequence[ClassMetric] = ()
    groups: Mapping[str, str] | None = None  # of each case; None: cases are independent
    roles: Mapping[str, Sequence[str]] | None = None  # training, validation, held out; of cases
    command: str | None = None  # that asked for it; None: part of a run, which has the page

    @property
    def scores(self) -> dict[str, str]:
        """Return the name and definition of each score."""
        return SCORES | {k: v for metric in self.metrics for k, v in metric.scores.items()}

    def score_all(self) -> Iterator[CaseScores]:
        """Yield every case in order, as soon as it is scored."""
        if self.workers == 1:  # no thread, so that Ctrl-C takes effect at once
            yield from map(self.score_case, self.pairs)
            return
        pool = ThreadPoolExecutor(self.workers)
        try:
            yield from pool.map(self.score_case, self.pairs)
        finally:  # Ctrl-C does not wait for cases that have not started
            pool.shutdown(cancel_futures=True)

    def score_case(self, pair: CasePair) -> CaseScores:
        """Read and score one case."""
        try:
            return self._score_case(pair)
        except UsageError as error:
            return CaseScores(name=pair.name, scores={}, error=" ".join(str(error).split()))

    def _score_case(self, pair: CasePair) -> CaseScores:
        if not pair.prediction:
            raise UsageError(
                f"{pair.reference[0]} has no prediction in {self.predictions}: predict it, or set "
                "missing_predictions=skip"
            )
        for files in (pair.prediction, pair.reference):
            if len(files) > 1:
                raise UsageError(f"several files with the same name: {', '.join(map(str, files))}")
        prediction_file, reference_file = pair.prediction[0], pair.reference[0]
        (prediction, prediction_affine), (reference, affine) = read_label_pair(
            prediction_file, reference_file
        )
        if prediction.shape != reference.shape:
            raise UsageError(
                f"{prediction_file} has shape {list(prediction.shape)}, {reference_file} has "
                f"{list(reference.shape)}: {SAME_GRID}"
            )
        if np.abs(prediction_affine - affine).max() > AFFINE_TOLERANCE_MM:
            raise UsageError(
                f"{prediction_file} has affine {prediction_affine[:3].round(4).tolist()}, "
                f"{reference_file} has {affine[:3].round(4).tolist()}: {SAME_GRID}"
            )
        labels = self._find_labels(prediction_file, prediction)
        labels |= self._find_labels(reference_file, reference)
        if self.names is None:
            classes: Mapping[str, Sequence[int]] = {str(c): (c,) for c in sorted(labels - {0})}
        else:
            classes = self.names.classes
        unknown = dict.fromkeys(self.scores, np.nan)  # where the reference does not annotate
        scores = score_case(
            prediction,
            reference,
            spacing_mm=get_spacing(affine, (0, 1, 2)),
            classes={name: c for name, c in classes.items() if name not in pair.unknown},
            tolerance_mm=self.tolerance_mm,
            ignore_labels=self.ignore_labels,
            metrics=self.metrics,
        )
        return CaseScores(name=pair.name, scores=dict.fromkeys(classes, unknown) | scores)

    def _find_labels(self, file: Path, volume: np.ndarray) -> set[int]:
        """Return the labels of a volume; refuse labels that are not classes."""
        labels = set(find_labels(volume)) - {*self.ignore_labels}
        known = self.names.known_labels if self.names else None
        if self.names is None and len(labels) > MAX_LABELS:
            raise UsageError(f"{file} holds {len(labels)} different values: is it an image?")
        unknown = sorted(c for c in labels if c < 0 or (known is not None and c not in known))
        if unknown:
            listed = ", ".join(map(str, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
            expected = "0 or above" if known is None else ", ".join(map(str, sorted(known)))
            raise UsageError(f"{file}: labels must be {expected}, it holds {listed}")
        return labels
