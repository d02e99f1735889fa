"""Summarize the training cases before normalization, and find scans that differ from them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from math import ceil
from typing import Any

import numpy as np

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)

MAX_VOXELS = 40**3  # voxels per channel that are sampled, which takes milliseconds and a few MiB
BACKGROUND_FRACTION = 0.1
"""A value with more than this fraction of the voxels counts as background, as 0 does."""

SPACING_FACTOR, EXTENT_FACTOR, SPREAD_FACTOR, OFFSET_MARGIN = 1.5, 2.0, 2.0, 0.5
"""Tolerance beyond the range of the training cases: factors, and a margin in spreads."""

MIN_STD = 0.02
"""Lower bound of a feature's standard deviation, which is unreliable for few training cases."""

MAX_COST = 16.0  # upper bound of one feature's cost: four standard deviations, squared
MIN_MARGIN = 8.0
"""Margin by which most training cases must prefer their own order for a swap to be detectable."""

Percentiles = tuple[float, ...]
"""The values at PERCENTILES of a channel's voxels without background."""

FloatTriple = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of one case, in its preprocessed orientation and box."""

    spacing_mm: FloatTriple  # of the file
    extent_mm: FloatTriple  # of the box
    percentiles: tuple[Percentiles, ...]  # of each channel


@dataclass(frozen=True, kw_only=True)
class TrainingStatistics:
    """Statistics over the training cases; stored in checkpoints."""

    cases: int
    spacing_mm: tuple[FloatTriple, ...]  # minimum, median and maximum of each axis
    extent_mm: tuple[FloatTriple, ...]  # likewise
    intensity_spreads: tuple[tuple[tuple[float, float], ...], ...]  # ranges of each channel
    intensity_offsets: tuple[FloatTriple, ...]  # minimum, median and maximum of each channel
    feature_means: tuple[tuple[float, ...], ...]  # of each channel's features
    feature_stds: tuple[tuple[float, ...], ...]  # likewise
    swap_thresholds: tuple[tuple[float, ...], ...]  # two channels, and the gain of swapped ones

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainingStatistics":
        return cls(**{key: to_tuples(value) for key, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        return {key: to_lists(value) for key, value in asdict(self).items()}


def measure_percentiles(channel: np.ndarray) -> Percentiles:
    """Return the percentiles of (D, H, W) without 0 and without another background value."""
    step = ceil((channel.size / MAX_VOXELS) ** (1 / 3))
    values = channel[::step, ::step, ::step].astype(float)
    values = values[values != 0]
    unique, counts = np.unique(values, return_counts=True)
    if len(unique) > 1 and counts.max() > BACKGROUND_FRACTION * len(values):
        values = values[values != unique[counts.argmax()]]
    return tuple(map(float, np.percentile(values, PERCENTILES))) if len(values) else (0.0,) * 7


def summarize_statistics(cases: Sequence[Statistics]) -> TrainingStatistics:
    """Compute the statistics over the training cases."""
    features = np.array([[_compute_features(p) for p in case.percentiles] for case in cases])
    spacing, extent, offsets = (
        _to_rows(np.stack([a.min(0), np.median(a, 0), a.max(0)], axis=1))
        for a in (
            np.array([case.spacing_mm for case in cases]),
            np.array([case.extent_mm for case in cases]),
            features[..., 1],
        )
    )
    return TrainingStatistics(
        cases=len(cases),
        spacing_mm=spacing,
        extent_mm=extent,
        intensity_spreads=tuple(
            _find_ranges([_get_spread(case.percentiles[c]) for case in cases])
            for c in range(features.shape[1])
        ),
        intensity_offsets=offsets,
        feature_means=_to_rows(features.mean(0)),
        feature_stds=_to_rows(features.std(0)),
        swap_thresholds=tuple(_find_detectable_swaps(features)),
    )


def describe_differences(
    case: Statistics,
    training: TrainingStatistics,
    channels: Sequence[str],
    normalize: Sequence[str],
) -> list[str]:
    """Describe how a case differs from the training cases; `normalize` is that of the channels."""
    messages = []
    for name, sizes, ranges, factor in (
        ("spacing", case.spacing_mm, training.spacing_mm, SPACING_FACTOR),
        ("size", case.extent_mm, training.extent_mm, EXTENT_FACTOR),
    ):
        pairs = list(zip(sizes, ranges, strict=True))
        if any(not low / factor <= size <= high * factor for size, (low, _, high) in pairs):
            messages.append(
                f"{name} {' x '.join(f'{size:.4g}' for size in sizes)} mm (training: "
                f"{' x '.join(_format_range(low, high) for _, (low, _, high) in pairs)})"
            )
    order = _find_channel_order(case, training)
    if order is not None:
        expected, found = ", ".join(channels), ", ".join(channels[c] for c in order)
        return [
            *messages,
            f"channels seem to be in a different order: expected {expected}, found {found}",
        ]
    for c, name in enumerate(channels):
        percentiles, spread = case.percentiles[c], _get_spread(case.percentiles[c])
        values = f"{name} has values of {_format_range(percentiles[1], percentiles[5])}"
        ranges = training.intensity_spreads[c]
        if not any(low / SPREAD_FACTOR <= spread <= high * SPREAD_FACTOR for low, high in ranges):
            expected = " or ".join(_format_range(low, high) for low, high in ranges)
            is_scaled = normalize[c if len(normalize) > 1 else 0].startswith("zscore")
            note = "; normalization removes a constant factor" if is_scaled else ""
            messages.append(
                f"{values}, a spread of {_format_number(spread)} (training: {expected}{note})"
            )
            continue
        low, _, high = training.intensity_offsets[c]
        offset = _compute_features(percentiles)[1]
        margin = max(OFFSET_MARGIN, high - low)
        if not low - margin <= offset <= high + margin:
            messages.append(
                f"{values}, a median of {offset:.2g} times their spread "
                f"(training: {low:.2g}..{high:.2g} times)"
            )
    return messages


def _get_spread(percentiles: Percentiles) -> float:
    return percentiles[5] - percentiles[1]  # 95 and 5


def _compute_features(percentiles: Percentiles) -> list[float]:
    """Return log10 of the spread, the median in spreads, and the histogram's shape."""
    median, spread = percentiles[3], max(_get_spread(percentiles), 1e-12)
    shape = [(percentiles[n] - median) / spread for n in (0, 2, 4, 5, 6)]
    return [float(np.log10(spread)), *(float(np.clip(f, -9, 9)) for f in (median / spread, *shape))]


def _find_ranges(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Return ranges that hold all values, separated where neighbors differ by a large factor.

    >>> _find_ranges([80, 70, 500, 101, 1e5])
    ((70, 101), (500, 500), (100000.0, 100000.0))
    """
    ordered = sorted(values)
    gaps = [(a, b) for a, b in pairwise(ordered) if b > a * SPREAD_FACTOR**2 or (b > a and a <= 0)]
    lows, highs = [ordered[0], *(b for _, b in gaps)], [*(a for a, _ in gaps), ordered[-1]]
    return tuple(zip(lows, highs, strict=True))


def _compute_costs(features: np.ndarray, means: np.ndarray, stds: np.ndarray) -> np.ndarray:
    """Return (C, C): how badly a scan's channel (row) matches a training channel (column)."""
    distance = (features[:, None] - means[None]) / np.maximum(stds, MIN_STD)[None]
    return np.minimum(distance**2, MAX_COST).sum(-1)


def _compute_swap_gain(costs: np.ndarray, i: int, j: int) -> float:
    """Return how much better two channels match when they are swapped."""
    return float(costs[i, i] + costs[j, j] - costs[i, j] - costs[j, i])


def _find_detectable_swaps(features: np.ndarray) -> Iterator[tuple[float, ...]]:
    """Yield (channel, channel, threshold) for the pairs that features (N, C, F) tell apart.

    Each training case is compared with the others (leave-one-out). If more than one in twenty
    hardly prefers its own order, a swap cannot be detected.
    """
    if len(features) < 4:
        return
    count = len(features) - 1
    means = (features.sum(0) - features) / count  # of the other cases, for each case
    squares = ((features - features.mean(0)) ** 2).sum(0)
    variances = (squares - (features - features.mean(0)) ** 2 * (count + 1) / count) / count
    stds = np.sqrt(np.maximum(variances, 0))
    costs = [_compute_costs(*case) for case in zip(features, means, stds, strict=True)]
    for i, j in combinations(range(features.shape[1]), 2):
        gains = np.array([_compute_swap_gain(c, i, j) for c in costs])
        margin = -float(np.percentile(gains, 95))
        threshold = max(margin / 2, float(gains.max()))
        if margin > max(MIN_MARGIN, threshold):
            yield i, j, threshold


def _find_channel_order(case: Statistics, training: TrainingStatistics) -> list[int] | None:
    """Return the training channel that each channel matches, if channels are clearly swapped."""
    from scipy.optimize import linear_sum_assignment

    features = np.array([_compute_features(percentiles) for percentiles in case.percentiles])
    means, stds = np.array(training.feature_means), np.array(training.feature_stds)
    costs = _compute_costs(features, means, stds)
    thresholds = training.swap_thresholds
    if not any(_compute_swap_gain(costs, int(i), int(j)) > t for i, j, t in thresholds):
        return None
    order = [int(c) for c in linear_sum_assignment(costs)[1]]
    return order if order != sorted(order) else None


def _format_range(low: float, high: float) -> str:
    ends = _format_number(low), _format_number(high)
    return ends[0] if ends[0] == ends[1] else f"{ends[0]}..{ends[1]}"


def _format_number(value: float) -> str:
    """Format with four significant digits, or all integer digits below 1e9.

    >>> _format_number(1234567.8), _format_number(12.3456)
    ('1,234,568', '12.35')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _to_rows(array: np.ndarray) -> Any:
    return to_tuples(array.tolist())


def to_lists(value: Any) -> Any:
    """Convert nested tuples to lists, for JSON and checkpoints."""
    return [to_lists(v) for v in value] if isinstance(value, tuple) else value


def to_tuples(value: Any) -> Any:
    """Convert nested lists to tuples."""
    return tuple(to_tuples(v) for v in value) if isinstance(value, list) else value
