"""The loss over a rising learning rate, and the rate at which it falls fastest."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHING = 0.9
"""Decay of the moving average of the loss: the losses of single batches are noisy."""

DIVERGED = 3.0
"""A loss that is this much as high as the first one has diverged."""

SKIPPED = 0.1
"""Fraction of the steps at either end in which no slope is trusted."""


class LRCurve:
    """Learning rates and losses, one of each per step."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        self._average = 0.0

    def add(self, rate: float, loss: float) -> None:
        """Note a step."""
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
        """Return the curve for other programs."""
        return {
            "suggestion": self.suggestion,
            "lr": self.rates,
            "loss": self.losses,
            "smoothed_loss": self.smoothed,
        }

    def plot(self, title: str) -> "Figure":
        """Plot the loss over the rate."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, color="#c8d0dc", label="loss of a batch")
        axes.plot(self.rates, self.smoothed, color="#5e81ac", label="moving average")
        if self.suggestion is not None:
            at = self.rates.index(self.suggestion)
            label = f"suggested: {self.suggestion:.1e}"
            axes.plot([self.suggestion], [self.smoothed[at]], "o", color="#bf616a", label=label)
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("training loss")
        axes.set_title(title, wrap=True)
        axes.legend(frameon=False)
        return figure
