"""Score every case of an evaluation; a case that cannot be scored is an error of its own."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from unet3d.config.settings.evaluation import EvaluationSettings
from unet3d.data.formats.labels import list_files_by_name, read_label_pair
from unet3d.data.formats.volumes import is_volume, split_suffix
from unet3d.data.layouts.groups import read_groups
from unet3d.data.layouts.label_names import LabelNames
from unet3d.data.preprocessing.resampling import get_spacing
from unet3d.errors import UsageError
from unet3d.metric.case_metric import ClassMetric
from unet3d.metric.scores import SCORES, find_labels, score_case
from unet3d.workflows.evaluation.options import (
    resolve_annotations,
    resolve_classes,
    resolve_ignore_labels,
    resolve_metrics,
    resolve_roles,
    resolve_tolerance,
)

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
            return self.score_files(pair, *self.get_files(pair))
        except UsageError as error:
            return CaseScores(name=pair.name, scores={}, error=" ".join(str(error).split()))

    def score_files(
        self, pair: CasePair, prediction_file: Path, reference_file: Path
    ) -> CaseScores:
        """Read and score the two files of a case."""
        prediction, reference, affine = self.read_pair(prediction_file, reference_file)
        labels = self.check_labels(prediction_file, prediction)
        labels |= self.check_labels(reference_file, reference)
        if self.names is None:
            classes: Mapping[str, Sequence[int]] = {str(c): (c,) for c in sorted(labels - {0})}
        else:
            classes = self.names.classes
        unknown = dict.fromkeys(self.scores, np.nan)  # where the reference does not annotate
        known = {name: c for name, c in classes.items() if name not in pair.unknown}
        scores = score_case(
            prediction,
            reference,
            spacing_mm=get_spacing(affine, (0, 1, 2)),
            classes=known,
            tolerance_mm=self.tolerance_mm,
            ignore_labels=self.ignore_labels,
            metrics=self.metrics,
        )
        return CaseScores(name=pair.name, scores=dict.fromkeys(classes, unknown) | scores)

    def get_files(self, pair: CasePair) -> tuple[Path, Path]:
        """Return the files of the prediction and the reference; refuse several, or none."""
        if not pair.prediction:
            raise UsageError(
                f"{pair.reference[0]} has no prediction in {self.predictions}: predict it, or set "
                "missing_predictions=skip"
            )
        for files in (pair.prediction, pair.reference):
            if len(files) > 1:
                raise UsageError(f"several files with the same name: {', '.join(map(str, files))}")
        return pair.prediction[0], pair.reference[0]

    def read_pair(
        self, prediction_file: Path, reference_file: Path
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return prediction and reference on one grid, and its affine."""
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
        return prediction, reference, affine

    def check_labels(self, file: Path, volume: np.ndarray) -> set[int]:
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


def build_evaluation(settings: EvaluationSettings) -> Evaluation:
    """Match the files and resolve the classes."""
    pairs, without_reference = match_files(settings.predictions, settings.references)
    if settings.skip_missing_predictions:
        pairs = [pair for pair in pairs if pair.prediction]
    names = resolve_classes(settings)
    annotations = resolve_annotations(settings, names)
    if annotations is not None:
        for finding in annotations.find_unmatched_patterns(pair.name for pair in pairs):
            raise UsageError(finding.message)
        pairs = [
            replace(pair, unknown=frozenset(annotations.find_unknown(pair.name))) for pair in pairs
        ]
    return Evaluation(
        predictions=", ".join(map(str, settings.predictions)),
        references=str(settings.references),
        output=settings.output,
        images=settings.images,
        draw_worst=settings.draw_worst,
        workers=settings.workers,
        pairs=pairs,
        without_reference=without_reference,
        names=names,
        ignore_labels=resolve_ignore_labels(settings, names),
        tolerance_mm=resolve_tolerance(settings, names),
        metrics=resolve_metrics(settings),
        groups=None
        if settings.group_by is None
        else read_groups(settings.group_by, [pair.name for pair in pairs], "group_by"),
        roles=resolve_roles(settings.checkpoints, [pair.name for pair in pairs]),
        command=settings.command,
    )


def match_files(predictions: Sequence[Path], references: Path) -> tuple[list[CasePair], list[str]]:
    """Match files by name, endings aside; also return the predictions without a reference."""
    for path in predictions:
        if not path.exists():
            raise UsageError(f"predictions: {path} is neither a file nor a folder")
    if not references.exists():
        raise UsageError(f"references: {references} is neither a file nor a folder")
    is_file = _is_file(references)
    if any(_is_file(path) != is_file for path in predictions):
        raise UsageError("predictions and references must be folders, or two files")
    if is_file:
        name = split_suffix(references)[0]
        return [CasePair(name=name, prediction=predictions, reference=[references])], []
    predicted: dict[str, list[Path]] = {}
    for folder in predictions:
        for name, files in list_files_by_name(folder).items():
            predicted.setdefault(name, []).extend(files)
    expected = list_files_by_name(references)
    if not predicted.keys() & expected.keys():
        folders = ", ".join(map(str, predictions))
        raise UsageError(
            f"no volume in {folders} ({len(predicted)} files) has the name of one in "
            f"{references} ({len(expected)} files)"
        )
    pairs = [
        CasePair(name=name, prediction=predicted.get(name, []), reference=files)
        for name, files in sorted(expected.items())
    ]
    return pairs, sorted(predicted.keys() - expected.keys())


def _is_file(path: Path) -> bool:
    return path.is_file() or is_volume(path)  # some formats are folders
