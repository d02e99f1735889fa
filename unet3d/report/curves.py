"""Curves of a run: of its training in a bounded number of points, of its loss by learning rate."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from unet3d.report.charts import Points
from unet3d.report.figures import make_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 512  # at this number, neighboring points are merged in pairs
SMOOTHING = 0.9  # decay of the moving average of the loss: those of single batches are noisy
DIVERGED = 3.0  # a loss that is this much as high as the first one has diverged
SKIPPED = 0.1  # fraction of the steps at either end in which no slope is trusted


class Curve:
    """Means of equally many values each, and of the steps that they belong to."""

    def __init__(self) -> None:
        self.points: list[list[float]] = []  # [step, value]
        self.every = 1  # values per point
        self.pending: list[list[float]] = []  # values of the incomplete point

    def add(self, step: float, value: float) -> None:
        """Add a value; NaN and infinities are ignored."""
        if not abs(value) < float("inf"):
            return
        self.pending.append([step, value])
        if len(self.pending) < self.every:
            return
        self.points.append(_average(self.pending))
        self.pending = []
        if len(self.points) == MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_average(pair) for pair in pairs]
            self.every *= 2

    def list_points(self) -> list[list[float]]:
        """Return the points, the incomplete one included."""
        return self.points + ([_average(self.pending)] if self.pending else [])

    def state_dict(self) -> dict[str, Any]:
        return {"points": list(self.points), "every": self.every, "pending": list(self.pending)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.points, self.pending = list(state["points"]), list(state["pending"])
        self.every = state["every"]


def _average(points: Points) -> list[float]:
    return [sum(values) / len(points) for values in zip(*points, strict=True)]


class LRCurve:
    """The loss over a rising learning rate, and the rate at which it falls fastest."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        self._average = 0.0

    def add(self, rate: float, loss: float) -> None:
        """Add the learning rate and the loss of a step."""
        self.rates.append(rate)
        self.losses.append(loss)
        self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
        self.smoothed.append(self._average / (1 - SMOOTHING ** len(self.losses)))

    @property
    def has_diverged(self) -> bool:
        """Return whether the loss has risen far above the first ones."""
        return self.smoothed[-1] > DIVERGED * self.smoothed[0]

    @property
    def suggestion(self) -> float | None:
        """Return the rate at which the loss falls fastest; None if it never falls."""
        skipped = int(SKIPPED * len(self.losses))
        slopes = np.gradient(self.smoothed)[skipped : len(self.losses) - max(1, skipped)]
        if not len(slopes) or not slopes.min() < 0:
            return None
        return self.rates[skipped + int(slopes.argmin())]

    def to_dict(self) -> dict[str, Any]:
        curve = {"lr": self.rates, "loss": self.losses, "smoothed_loss": self.smoothed}
        return {"suggestion": self.suggestion, **curve}

    def plot(self, title: str) -> "Figure":
        figure = make_figure(8, 4.5)
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, color="#c8d0dc", label="loss of a batch")
        axes.plot(self.rates, self.smoothed, color="#5e81ac", label="moving average")
        if self.suggestion is not None:
            at = self.rates.index(self.suggestion)
            label = f"suggested: {self.suggestion:.1e}"
            axes.plot([self.suggestion], [self.smoothed[at]], "o", color="#bf616a", label=label)
        axes.set(xscale="log", xlabel="learning rate", ylabel="training loss")
        axes.set_title(title, wrap=True)
        axes.legend(frameon=False)
        return figure
