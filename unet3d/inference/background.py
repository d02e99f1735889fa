"""Find windows that show nothing but background, without a network."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PERCENTILES = 0.5, 99.5
"""The darkest and the brightest voxels of a channel."""

MAX_VOXELS = 2**18
"""Size of the sample from which the percentiles are computed."""

MIN_LEVEL = 1e-5
"""Interpolation between equal voxels rounds."""

LOGIT = 10.0
"""Margin of the background where no window is computed: a probability of 0.9999."""


@dataclass(frozen=True)
class BackgroundTest:
    """A window is background if no voxel of any channel is above the channel's threshold."""

    thresholds: tuple[float, ...]
    logits: tuple[float, ...]  # of the voxels that no computed window covers

    def is_background(self, window: Tensor) -> bool:
        """Return whether a window (C, D, H, W), without its padding, is background."""
        return all(
            bool(channel.max() <= threshold)
            for channel, threshold in zip(window, self.thresholds, strict=True)
        )


def make_background_test(
    image: Tensor, level: float, *, outputs: int, overlapping: bool
) -> BackgroundTest:
    """Return the test for a preprocessed image (C, D, H, W).

    `level` is between the darkest voxels, 0, and the brightest, 1. The `outputs` are classes of
    which the first is the background or, if `overlapping`, regions.
    """
    step = max(1, round((image[0].numel() / MAX_VOXELS) ** (1 / 3)))
    sample = image[:, ::step, ::step, ::step].flatten(1).cpu().numpy()
    thresholds = []
    for low, high in np.percentile(sample, PERCENTILES, axis=1).T:
        thresholds.append(float(low + max(level, MIN_LEVEL) * (high - low)))
    logits = [-LOGIT] * outputs if overlapping else [LOGIT, *[0.0] * (outputs - 1)]
    return BackgroundTest(tuple(thresholds), tuple(logits))


def fill_uncovered(logits: Tensor, weights: Tensor, values: Sequence[float]) -> None:
    """Write `values` (K) to logits (K, D, H, W) where the sum of the windows' weights is 0."""
    uncovered = weights == 0
    if torch.any(uncovered):
        for logit, value in zip(logits, values, strict=True):
            logit.masked_fill_(uncovered, value)
