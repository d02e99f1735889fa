"""Curves of a run in a bounded number of points, however long it is."""

from collections.abc import Mapping, Sequence
from typing import Any

MAX_POINTS = 512
"""Number of points at which pairs of them are merged."""

Points = Sequence[Sequence[float]]
"""(step, value) pairs."""


class Curve:
    """Means of equally many values each, and of the steps that they belong to."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self.max_points = max_points
        self.points: list[list[float]] = []  # [step, value]
        self.every = 1  # values per point
        self.pending: list[list[float]] = []  # of the incomplete point

    def add(self, step: float, value: float) -> None:
        """Add a value; NaN and infinities are ignored."""
        if not abs(value) < float("inf"):
            return
        self.pending.append([step, value])
        if len(self.pending) < self.every:
            return
        self.points.append(_average(self.pending))
        self.pending = []
        if len(self.points) == self.max_points:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_average(pair) for pair in pairs]
            self.every *= 2

    def list_points(self) -> list[list[float]]:
        """Return the points, the incomplete one included."""
        return self.points + ([_average(self.pending)] if self.pending else [])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, for a checkpoint."""
        return {"points": list(self.points), "every": self.every, "pending": list(self.pending)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.points, self.pending = list(state["points"]), list(state["pending"])
        self.every = state["every"]


def _average(points: Points) -> list[float]:
    return [sum(values) / len(points) for values in zip(*points, strict=True)]
