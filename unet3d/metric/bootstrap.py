"""Compute means over cases with bootstrap confidence intervals, per class and over classes."""

from collections.abc import Sequence

import numpy as np

DEFINITION = (
    "mean over the cases that have the class, with a 95% confidence interval from a percentile "
    "bootstrap over cases, or over groups of cases where these are known (10,000 resamples, seed "
    "0); the mean over classes is that of their means, over resamples that have all of them"
)
RESAMPLES, CHUNK = 10_000, 500
MIN_UNITS = 3
"""Cases, or groups of cases, that an interval needs: resamples of two have three means."""


def compute_bootstrap_means(
    values: np.ndarray, groups: Sequence[str] | None = None
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Return statistics per class and over classes, from (cases, classes) with NaN for no score.

    `groups` has the group of each case, such as its patient: whole groups are resampled, because
    their cases are not independent. Intervals of fewer than MIN_UNITS and means of none are NaN.
    """
    valid = ~np.isnan(values)
    per_class, sizes = resample_means(values, groups)
    statistics = []
    for c in range(values.shape[1]):
        scores, scored_units = values[valid[:, c], c], int((sizes[:, c] > 0).sum())
        statistics.append(
            {
                "mean": float(scores.mean()) if len(scores) else np.nan,
                **_compute_interval(per_class[:, c], scored_units),
                "median": float(np.median(scores)) if len(scores) else np.nan,
                "cases": len(scores),
                **({} if groups is None else {"groups": scored_units}),
            }
        )
    mean = _average_classes(np.array([[entry["mean"] for entry in statistics]]), valid)
    interval = _compute_interval(_average_classes(per_class, valid), sizes.any(1).sum())
    return statistics, {"mean": float(mean[0])} | interval


def compute_bootstrap_difference(
    values: np.ndarray, others: np.ndarray, groups: Sequence[str] | None = None
) -> dict[str, float]:
    """Return the difference of two means over classes, of the same (cases, classes)."""
    both = np.concatenate([values, others], 1)
    valid, classes = ~np.isnan(both), values.shape[1]
    per_class, sizes = resample_means(both, groups)
    with np.errstate(invalid="ignore"):
        per_class = np.concatenate([[np.nansum(both, 0) / valid.sum(0)], per_class])
    one, other = (
        _average_classes(per_class[:, part], valid[:, part])
        for part in (slice(classes), slice(classes, None))
    )
    mean, *resampled = one - other
    units = (sizes[:, :classes].any(1) & sizes[:, classes:].any(1)).sum()
    return {"mean": float(mean)} | _compute_interval(np.array(resampled), units)


@np.errstate(invalid="ignore")  # 0 / 0: the resample has no case of the class
def resample_means(
    values: np.ndarray, groups: Sequence[str] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return each resample's mean of each class, and how many scores a group has of it."""
    cases, classes = values.shape
    valid = ~np.isnan(values)
    units = np.arange(cases) if groups is None else np.unique(groups, return_inverse=True)[1]
    count = int(units.max()) + 1
    sums, sizes = np.zeros((2, count, classes))
    np.add.at(sums, units, np.where(valid, values, 0))
    np.add.at(sizes, units, valid)
    rng = np.random.default_rng(0)
    resampled = []
    for _ in range(0, RESAMPLES, CHUNK):
        indices = rng.integers(0, count, (CHUNK, count)) + count * np.arange(CHUNK)[:, None]
        drawn = np.bincount(indices.ravel(), minlength=CHUNK * count).reshape(CHUNK, count)
        resampled.append((drawn @ sums) / (drawn @ sizes))
    return np.concatenate(resampled), sizes


def _average_classes(means: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Average over the classes that any case has; NaN where a resample lacks one of them."""
    scored = valid.any(0)
    return means[:, scored].mean(1) if scored.any() else np.full(len(means), np.nan)


def _compute_interval(means: np.ndarray, units: int) -> dict[str, float]:
    means = means[~np.isnan(means)]
    low, high = (
        np.percentile(means, (2.5, 97.5)) if units >= MIN_UNITS and len(means) else (np.nan,) * 2
    )
    return {"low": float(low), "high": float(high)}
