"""Compute means over cases with bootstrap confidence intervals, per class and over classes."""

from collections.abc import Sequence

import numpy as np

DEFINITION = (
    "mean over the cases that have the class, with a 95% confidence interval from a percentile "
    "bootstrap over cases, or over groups of cases where these are known (10,000 resamples, seed "
    "0); the mean over classes is that of their means"
)
RESAMPLES, CHUNK = 10_000, 500


@np.errstate(invalid="ignore")  # 0 / 0: the resample has no case of the class
def compute_bootstrap_means(
    values: np.ndarray, groups: Sequence[str] | None = None
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Return statistics per class and over classes, from (cases, classes) with NaN for no score.

    `groups` has the group of each case, such as its patient: whole groups are resampled, because
    their cases are not independent. Intervals of fewer than two of them and means of none are NaN.
    """
    cases, classes = values.shape
    valid = ~np.isnan(values)
    filled = np.where(valid, values, 0)
    units = np.arange(cases) if groups is None else np.unique(groups, return_inverse=True)[1]
    count = int(units.max()) + 1
    sums, sizes = np.zeros((2, count, classes))
    np.add.at(sums, units, filled)
    np.add.at(sizes, units, valid)
    rng = np.random.default_rng(0)
    resampled = []
    for _ in range(0, RESAMPLES, CHUNK):
        indices = rng.integers(0, count, (CHUNK, count)) + count * np.arange(CHUNK)[:, None]
        drawn = np.bincount(indices.ravel(), minlength=CHUNK * count).reshape(CHUNK, count)
        resampled.append((drawn @ sums) / (drawn @ sizes))
    per_class = np.concatenate(resampled)  # (resamples, classes)
    statistics = []
    for c in range(classes):
        scored, scored_units = int(valid[:, c].sum()), int((sizes[:, c] > 0).sum())
        statistics.append(
            {
                "mean": float(filled[:, c].sum() / scored) if scored else np.nan,
                **_compute_interval(per_class[:, c], scored_units),
                "median": float(np.median(values[valid[:, c], c])) if scored else np.nan,
                "cases": scored,
                **({} if groups is None else {"groups": scored_units}),
            }
        )
    overall = _average_classes(np.array([[entry["mean"] for entry in statistics]]))
    interval = _compute_interval(_average_classes(per_class), sizes.any(1).sum())
    return statistics, {"mean": float(overall[0])} | interval


def _average_classes(values: np.ndarray) -> np.ndarray:
    return np.nansum(values, 1) / (~np.isnan(values)).sum(1)


def _compute_interval(means: np.ndarray, units: int) -> dict[str, float]:
    low, high = np.nanpercentile(means, (2.5, 97.5)) if units >= 2 else (np.nan, np.nan)
    return {"low": float(low), "high": float(high)}
