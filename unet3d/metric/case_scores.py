"""Scores of validation cases beside Dice: HD95, and those of the metrics of the config."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from unet3d.metric.scores import ClassMetric, LogitMetric, score_case
from unet3d.types import get_ignore_label

MAX_POINTS = 1_000_000
"""Surface voxels of a class, above which it is not scored.

The noise that an untrained network predicts has more: a meaningless number would take minutes.
"""


class CaseMetricAccumulator:
    """Scores of each case; call `begin` and `end` for every one, then `compute`.

    Absent classes are scored as in an evaluation (`scores.RULES`).
    """

    def __init__(
        self,
        metrics: Sequence[ClassMetric | LogitMetric],
        scored_classes: Mapping[str, Sequence[int]],  # name -> labels
        spacing_mm: Mapping[str, Sequence[float]],  # by case
        *,
        hd95: bool,
    ):
        self.class_metrics = [m for m in metrics if isinstance(m, ClassMetric)]
        self.logit_metrics = [m for m in metrics if isinstance(m, LogitMetric)]
        self.class_scores = [score for metric in self.class_metrics for score in metric.scores]
        if hd95:
            self.class_scores.insert(0, "hd95_mm")
        self.max_points = MAX_POINTS if hd95 else 0
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

    def end(
        self, case: str, prediction: Tensor, labels: Tensor, *, loss: float | None = None
    ) -> None:
        """Add a case with its predicted and reference labels (D, H, W), and its loss."""
        scores = {k: v for metric in self.logit_metrics for k, v in metric.finish().items()}
        if loss is not None:
            scores["loss"] = loss
        if self.class_scores:
            by_class = score_case(
                prediction.cpu().numpy(),
                labels.cpu().numpy(),
                spacing_mm=self.spacing_mm[case],
                classes=self.scored_classes,
                ignore_labels=[get_ignore_label(labels)],
                max_points=self.max_points,
                metrics=self.class_metrics,
            )
            for name, values in by_class.items():
                scores |= {f"{score}/{name}": values[score] for score in self.class_scores}
        self.cases.append(scores)

    def compute(self) -> dict[str, float]:
        """Return means over the cases that have a score, and over classes; NaN if none has it.

        HD95 without a case that has it is left out.
        """
        names = dict.fromkeys(name for case in self.cases for name in case)
        means = {name: compute_mean([case[name] for case in self.cases]) for name in names}
        scores: dict[str, list[float]] = {}
        for name, mean in list(means.items()):
            if name.startswith("hd95_mm/") and np.isnan(mean):
                del means[name]
            else:
                scores.setdefault(name.partition("/")[0], []).append(mean)
        return {score: compute_mean(values) for score, values in scores.items()} | means


def compute_mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are numbers; NaN if none is."""
    numbers = [value for value in values if not np.isnan(value)]
    return float(np.mean(numbers)) if numbers else float("nan")
