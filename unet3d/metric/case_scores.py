"""Scores of validation cases beside Dice: HD95, and those of the metrics of the config."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from unet3d.metric.scores import (
    ClassMetric,
    LogitMetric,
    call_metrics,
    iter_masks,
    mask_ignored,
    score_case,
)
from unet3d.types import IGNORE_LABEL

MAX_POINTS = 1_000_000
"""Surface voxels of a class, above which it is not scored.

The noise that an untrained network predicts has more: a meaningless number would take minutes.
"""


class CaseMetricAccumulator:
    """Scores of each case; call `begin` and `end` for every one, then `compute`."""

    def __init__(
        self,
        metrics: Sequence[ClassMetric | LogitMetric],
        scored_classes: Mapping[str, Sequence[int]],  # name -> labels
        spacing_mm: Mapping[str, Sequence[float]],  # by case
    ):
        self.class_metrics = [m for m in metrics if isinstance(m, ClassMetric)]
        self.logit_metrics = [m for m in metrics if isinstance(m, LogitMetric)]
        self.scored_classes, self.spacing_mm = scored_classes, spacing_mm
        self.reset()

    def reset(self) -> None:
        self.cases: list[dict[str, float]] = []

    def begin(self, labels: Tensor) -> Callable[[Sequence[tuple[int, int]], Tensor], None] | None:
        """Begin a case with labels (D, H, W); return what takes boxes and logits of its parts."""
        for metric in self.logit_metrics:
            metric.start()

        def update(box: Sequence[tuple[int, int]], logits: Tensor) -> None:
            part = labels[tuple(slice(*span) for span in box)]
            for metric in self.logit_metrics:
                metric.update(logits, part)

        return update if self.logit_metrics else None

    def end(self, case: str, prediction: Tensor, labels: Tensor) -> None:
        """Add a case with its predicted and reference labels (D, H, W)."""
        scores = {k: v for metric in self.logit_metrics for k, v in metric.finish().items()}
        if self.class_metrics:
            volumes = prediction.cpu().numpy(), labels.cpu().numpy()
            known = mask_ignored(*volumes, [IGNORE_LABEL])
            for name, p, r in iter_masks(*known, self.scored_classes):
                values = call_metrics(self.class_metrics, p, r, self.spacing_mm[case])
                scores |= {f"{score}/{name}": value for score, value in values.items()}
        self.cases.append(scores)

    def compute(self) -> dict[str, float]:
        """Return means over the cases that have a score, and over classes; NaN if none has it."""
        names = dict.fromkeys(name for case in self.cases for name in case)
        means = {name: compute_mean([case[name] for case in self.cases]) for name in names}
        scores: dict[str, list[float]] = {}
        for name, mean in means.items():
            scores.setdefault(name.partition("/")[0], []).append(mean)
        return {score: compute_mean(values) for score, values in scores.items()} | means


class ValidationHD95:
    """HD95 of each class; absent ones are scored as in an evaluation (`scores.RULES`)."""

    def __init__(
        self,
        scored_classes: Mapping[str, Sequence[int]],
        spacing_mm: Mapping[str, Sequence[float]],
    ):
        self.scored_classes, self.spacing_mm = scored_classes, spacing_mm
        self.reset()

    def reset(self) -> None:
        self.distances_mm: list[list[float]] = []  # (volumes, classes)

    def update(self, cases: Sequence[str], prediction: Tensor, labels: Tensor) -> None:
        """Add predicted and reference labels, both (B, D, H, W)."""
        for case, p, t in zip(cases, prediction.cpu().numpy(), labels.cpu().numpy(), strict=True):
            scores = score_case(
                p,
                t,
                spacing_mm=self.spacing_mm[case],
                classes=self.scored_classes,
                ignore_labels=[IGNORE_LABEL],
                max_points=MAX_POINTS,
            )
            self.distances_mm.append([by_class["hd95_mm"] for by_class in scores.values()])

    def compute(self) -> dict[str, float]:
        """Return `hd95_mm` (mean over classes) and `hd95_mm/<class>`, without undefined ones."""
        columns = zip(*self.distances_mm, strict=True)
        means = dict(zip(self.scored_classes, map(compute_mean, columns), strict=False))
        known = {f"hd95_mm/{name}": mean for name, mean in means.items() if not np.isnan(mean)}
        return {"hd95_mm": compute_mean(list(known.values()))} | known if known else {}


def compute_mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are numbers; NaN if none is."""
    numbers = [value for value in values if not np.isnan(value)]
    return float(np.mean(numbers)) if numbers else float("nan")
