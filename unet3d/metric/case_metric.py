"""What a metric is, for those of this package and of users."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor


@runtime_checkable
class ClassMetric(Protocol):
    """Scores one class of a case, from masks; validation and evaluation call it."""

    scores: Mapping[str, str]
    """Name and definition of each score."""

    def __call__(
        self, prediction: np.ndarray, reference: np.ndarray, spacing_mm: Sequence[float]
    ) -> Mapping[str, float]:
        """Return the scores of two masks (D, H, W), of which one at least is not empty.

        They are cropped to the box that holds both.
        """
        ...


@runtime_checkable
class LogitMetric(Protocol):
    """Scores the logits of a case, part by part; validation calls it."""

    def start(self) -> None:
        """Begin a case."""
        ...

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (K, ...) and labels (...) of a part; labels of K and more are unknown."""
        ...

    def finish(self) -> Mapping[str, float]:
        """Return the scores of the case."""
        ...
