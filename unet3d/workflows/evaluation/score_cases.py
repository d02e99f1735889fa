"""From the config of `unet3d evaluate` to the scores of every case, faults beside them."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import expand_paths, to_plain_dict
from unet3d.data.layouts.label_names import LabelNames
from unet3d.data.nifti.labels import files_by_name, read_labels
from unet3d.data.preprocessing.resampling import spacing
from unet3d.errors import UsageError
from unet3d.metric.scores import find_labels, score_case
from unet3d.workflows.evaluation.options import (
    parse_tolerance,
    resolve_classes,
    resolve_ignore_label,
)

SAME_AFFINE = 1e-3
"""Affines that differ by more than this, in mm, are different grids."""

MOST_FOUND = 255
"""A file with more different labels than this, none of them named, is taken for an image."""


@dataclass(frozen=True, kw_only=True)
class CasePair:
    """The files of one case: one each, unless one is missing or several have its name."""

    name: str
    prediction: Sequence[Path]
    reference: Sequence[Path]
    image: Path | None = None  # what it is drawn over, if not what `images=` says


@dataclass(frozen=True, kw_only=True)
class CaseScores:
    """One case's scores by class, or why there are none."""

    name: str
    scores: Mapping[str, Mapping[str, float]]
    fault: str | None = None

    @property
    def dice(self) -> float:
        """The mean over the classes that the case has; NaN if it has none."""
        found = [s["dice"] for s in self.scores.values() if not np.isnan(s["dice"])]
        return sum(found) / len(found) if found else np.nan


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is compared with what, and how."""

    config: Mapping[str, Any]
    pairs: Sequence[CasePair]
    without_reference: Sequence[str]
    names: LabelNames | None  # None: every label found is a class
    ignore_label: int | None
    tolerance_mm: float | Mapping[str, float]

    @property
    def output(self) -> Path:
        return Path(self.config["output"])

    def score_all(self) -> Iterator[CaseScores]:
        """Every case in the order of the names, each as soon as it is known."""
        if self.config["workers"] == 1:  # without a thread, so that Ctrl-C is answered at once
            yield from map(self.score_case, self.pairs)
            return
        pool = ThreadPoolExecutor(self.config["workers"])
        try:
            yield from pool.map(self.score_case, self.pairs)
        finally:  # Ctrl-C does not wait for the cases that have not begun
            pool.shutdown(cancel_futures=True)

    def score_case(self, pair: CasePair) -> CaseScores:
        """Read and compare one case."""
        try:
            prediction, reference, affine = self.read_pair(pair)
            labels = self.check_labels(pair.prediction[0], prediction)
            labels |= self.check_labels(pair.reference[0], reference)
        except UsageError as fault:
            return CaseScores(name=pair.name, scores={}, fault=" ".join(str(fault).split()))
        if self.names is None:
            classes = {str(c): (c,) for c in sorted(labels - {0})}
        else:
            classes = self.names.classes
        found = score_case(
            prediction,
            reference,
            spacing_mm=spacing(affine, (0, 1, 2)),
            classes=classes,
            tolerance_mm=self.tolerance_mm,
            ignore_label=self.ignore_label,
        )
        return CaseScores(name=pair.name, scores=found)

    def read_pair(self, pair: CasePair) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Prediction and reference on one grid, and its affine."""
        if not pair.prediction:
            raise UsageError(
                f"{pair.reference[0]} has no prediction in {self.config['predictions']}"
            )
        for files in (pair.prediction, pair.reference):
            if len(files) > 1:
                raise UsageError(f"several files of one name: {', '.join(map(str, files))}")
        (predicted,), (referred,) = pair.prediction, pair.reference
        prediction, given = read_labels(predicted)
        reference, affine = read_labels(referred)
        if prediction.shape != reference.shape:
            raise UsageError(
                f"{predicted} has the shape {list(prediction.shape)} and {referred} "
                f"{list(reference.shape)}"
            )
        if np.abs(given - affine).max() > SAME_AFFINE:
            raise UsageError(
                f"{predicted} has the affine {given[:3].round(4).tolist()} and {referred} "
                f"{affine[:3].round(4).tolist()}"
            )
        return prediction, reference, affine

    def check_labels(self, file: Path, volume: np.ndarray) -> set[int]:
        """The labels in a volume; some that nothing names are a fault."""
        found = set(find_labels(volume)) - {self.ignore_label}
        known = self.names.known if self.names else None
        if self.names is None and len(found) > MOST_FOUND:
            raise UsageError(f"{file} holds {len(found)} different values: is it an image?")
        strange = sorted(c for c in found if c < 0 or (known is not None and c not in known))
        if strange:
            shown = ", ".join(map(str, strange[:5])) + (", ..." if len(strange) > 5 else "")
            wanted = "0 or above" if known is None else ", ".join(map(str, sorted(known)))
            raise UsageError(f"{file}: labels must be {wanted}, it holds {shown}")
        return found


def build_evaluation(request: ComposedConfig) -> Evaluation:
    """Check the config and match the files."""
    cfg = to_plain_dict(request.config)
    for key, least in (("workers", 1), ("draw_worst", 0)):
        if not isinstance(cfg[key], int) or cfg[key] < least:
            raise UsageError(f"{key} must be an int >= {least}, got {cfg[key]!r}")
    if Path(cfg["output"]).exists() and not Path(cfg["output"]).is_dir():
        raise UsageError(f"output: {cfg['output']} is a file; it must be a folder")
    if cfg["images"] is not None and not Path(cfg["images"]).exists():
        raise UsageError(f"images: {cfg['images']} is neither a file nor a folder")
    if cfg["missing_predictions"] not in ("error", "ignore"):
        raise UsageError(f"missing_predictions must be error or ignore, got {cfg['missing']!r}")
    pairs, without_reference = match_files(
        expand_paths(cfg["predictions"]), Path(cfg["references"])
    )
    if cfg["missing_predictions"] == "ignore":
        pairs = [pair for pair in pairs if pair.prediction]
    names = resolve_classes(cfg)
    return Evaluation(
        config=cfg,
        pairs=pairs,
        without_reference=without_reference,
        names=names,
        ignore_label=resolve_ignore_label(cfg, names),
        tolerance_mm=parse_tolerance(cfg["tolerance_mm"], names),
    )


def match_files(predictions: Sequence[Path], references: Path) -> tuple[list[CasePair], list[str]]:
    """Files of the same name, suffixes apart; and the predictions without a reference."""
    for path in predictions:
        if not path.exists():
            raise UsageError(f"predictions: {path} is neither a file nor a folder")
    if not references.exists():
        raise UsageError(f"references: {references} is neither a file nor a folder")
    if any(path.is_file() != references.is_file() for path in predictions):
        raise UsageError("predictions and references must be folders, or two files")
    if references.is_file():
        name = references.name.removesuffix(".gz").removesuffix(".nii")
        return [CasePair(name=name, prediction=predictions, reference=[references])], []
    given: dict[str, list[Path]] = {}
    for folder in predictions:
        for name, files in files_by_name(folder).items():
            given.setdefault(name, []).extend(files)
    wanted = files_by_name(references)
    if not given.keys() & wanted.keys():
        folders = ", ".join(map(str, predictions))
        raise UsageError(
            f"no .nii or .nii.gz in {folders} ({len(given)} files) has the name of one in "
            f"{references} ({len(wanted)} files)"
        )
    pairs = [
        CasePair(name=name, prediction=given.get(name, []), reference=files)
        for name, files in sorted(wanted.items())
    ]
    return pairs, sorted(given.keys() - wanted.keys())
