"""Compute means over cases with bootstrap confidence intervals, per class and over classes."""

from collections.abc import Sequence

import numpy as np

DEFINITION = (
    "mean over the cases that have the class, with a 95% confidence interval from a percentile "
    "bootstrap over cases, or over groups of cases where these are known (10,000 resamples, seed "
    "0); the mean over classes is that of their means"
)
RESAMPLES, CHUNK = 10_000, 500


def compute_bootstrap_means(
    values: np.ndarray, groups: Sequence[str] | None = None
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Return statistics per class and over classes, from (cases, classes) with NaN for no score.

    `groups` has the group of each case, such as its patient: whole groups are resampled, because
    their cases are not independent. Intervals of fewer than two cases or groups and means of none
    are NaN.
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
        resampled.append(_mean(drawn @ sums, drawn @ sizes))
    per_class = np.concatenate(resampled)  # (resamples, classes)
    classwise = [
        {
            "mean": float(_mean(filled[:, c].sum(), valid[:, c].sum())),
            **_interval(per_class[:, c], (sizes[:, c] > 0).sum()),
            "median": float(np.median(values[valid[:, c], c])) if valid[:, c].any() else np.nan,
            "cases": int(valid[:, c].sum()),
            **({} if groups is None else {"groups": int((sizes[:, c] > 0).sum())}),
        }
        for c in range(classes)
    ]
    mean = _nanmean(np.array([[statistics["mean"] for statistics in classwise]]))[0]
    interval = _interval(_nanmean(per_class), sizes.any(1).sum())
    return classwise, {"mean": float(mean)} | interval


def _mean(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # 0 / 0: the resample has no case of the class
        return np.true_divide(total, count)


def _nanmean(values: np.ndarray) -> np.ndarray:
    valid = ~np.isnan(values)
    return _mean(np.where(valid, values, 0).sum(1), valid.sum(1))


def _interval(means: np.ndarray, units: int) -> dict[str, float]:
    if units < 2:
        return {"low": np.nan, "high": np.nan}
    low, high = np.nanpercentile(means, (2.5, 97.5))
    return {"low": float(low), "high": float(high)}
