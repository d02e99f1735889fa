"""Means over cases with a confidence interval, for each class and for the mean over classes."""

import numpy as np

DEFINITION = (
    "mean over the cases that have the class, with a 95 % interval: the percentile bootstrap over "
    "cases, 10,000 resamples, seed 0; the mean over classes is the mean of their means"
)
RESAMPLES, AT_ONCE = 10_000, 500


def bootstrap_means(
    values: np.ndarray,
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Of (cases, classes), NaN where a case is left out: each class's, and over the classes.

    An interval needs two cases; without them, and without any case, the numbers are NaN.
    """
    cases, classes = values.shape
    there = ~np.isnan(values)
    filled = np.where(there, values, 0)
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(0, RESAMPLES, AT_ONCE):
        chosen = rng.integers(0, cases, (AT_ONCE, cases)) + cases * np.arange(AT_ONCE)[:, None]
        times = np.bincount(chosen.ravel(), minlength=AT_ONCE * cases).reshape(AT_ONCE, cases)
        drawn.append(_mean(times @ filled, times @ there))
    per_class = np.concatenate(drawn)  # (resamples, classes)
    found = [
        {
            "mean": float(_mean(filled[:, c].sum(), there[:, c].sum())),
            **_interval(per_class[:, c], there[:, c].sum()),
            "median": float(np.median(values[there[:, c], c])) if there[:, c].any() else np.nan,
            "cases": int(there[:, c].sum()),
        }
        for c in range(classes)
    ]
    over_classes = _nanmean(per_class), _nanmean(np.array([[f["mean"] for f in found]]))
    overall = {"mean": float(over_classes[1][0])}
    return found, overall | _interval(over_classes[0], there.any(1).sum())


def _mean(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # 0 / 0: no case of the class was drawn
        return np.true_divide(total, count)


def _nanmean(values: np.ndarray) -> np.ndarray:
    there = ~np.isnan(values)
    return _mean(np.where(there, values, 0).sum(1), there.sum(1))


def _interval(drawn: np.ndarray, cases: int) -> dict[str, float]:
    if cases < 2:
        return {"low": np.nan, "high": np.nan}
    low, high = np.nanpercentile(drawn, (2.5, 97.5))
    return {"low": float(low), "high": float(high)}
