"""What the training cases are like before normalization, and in what a scan is unlike them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from math import ceil
from typing import Any

import numpy as np

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)

VOXELS = 40**3
"""At most so many of a channel's voxels are looked at, which costs milliseconds and few MiB."""

COMMON = 0.1
"""A value that this share of the voxels have is a background's, as 0 is."""

SPACING, EXTENT, SPREAD, OFFSET = 1.5, 2.0, 2.0, 0.5
"""How far beyond the training cases a scan may be: three factors, and a part of the spread."""

FLOOR = 0.02
"""The least deviation of a feature over the training cases: there may be few of them."""

CAP = 16.0
"""The most that a single feature says against a channel: four deviations, squared."""

EVIDENCE = 8.0
"""By how much nearly every training case must fit its own order better for an order to be told."""

Levels = tuple[float, ...]
"""The values at PERCENTILES of a channel's voxels, without the background."""

Three = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Of one case, in the orientation and within the box that it is prepared in."""

    spacing_mm: Three  # of the file
    extent_mm: Three  # of the box
    levels: tuple[Levels, ...]  # of each channel

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Statistics":
        """From plain values."""
        return cls(**{key: _tuples(value) for key, value in values.items()})


@dataclass(frozen=True, kw_only=True)
class TrainingStatistics:
    """Over the training cases; kept in checkpoints."""

    cases: int
    spacing_mm: tuple[Three, ...]  # least, median and most, of each axis
    extent_mm: tuple[Three, ...]  # likewise
    spreads: tuple[tuple[tuple[float, float], ...], ...]  # of each channel: ranges, ascending
    offsets: tuple[Three, ...]  # least, median and most, of each channel
    means: tuple[tuple[float, ...], ...]  # of each channel's features
    deviations: tuple[tuple[float, ...], ...]  # likewise
    swaps: tuple[tuple[float, ...], ...]  # two channels, and what tells that they are swapped

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], channels: int) -> "TrainingStatistics":
        """From what `settings` gave; ValueError if it is something else."""
        made = cls(**{key: _tuples(value) for key, value in values.items()})
        if not all(type(leaf) in (int, float) for leaf in _leaves(tuple(asdict(made).values()))):
            raise ValueError("the statistics of the training cases must be numbers")
        per_axis = np.array([made.spacing_mm, made.extent_mm], float)
        features = np.array([made.means, made.deviations], float)
        offsets, swaps = np.array(made.offsets, float), np.array(made.swaps, float)
        spreads = [np.array(ranges, float) for ranges in made.spreads]
        shapes = (per_axis.shape, offsets.shape, features.shape, len(spreads))
        arrays = (per_axis, offsets, features, swaps, *spreads)
        if (
            type(made.cases) is not int
            or shapes != ((2, 3, 3), (channels, 3), (2, channels, FEATURES), channels)
            or any(ranges.ndim != 2 or ranges.shape[1] != 2 for ranges in spreads)
            or (swaps.size and (swaps.ndim != 2 or swaps.shape[1] != 3))
            or (swaps.size and not set(swaps[:, :2].ravel()) <= set(range(channels)))
            or not all(np.isfinite(array).all() for array in arrays)
        ):
            raise ValueError("the statistics of the training cases are not of its channels")
        return made

    def to_dict(self) -> dict[str, Any]:
        """All of the above, as plain values."""
        return {key: _lists(value) for key, value in asdict(self).items()}


def measure(channel: np.ndarray) -> Levels:
    """(D, H, W) -> the percentiles of its voxels, without 0 and a background of another value."""
    step = ceil((channel.size / VOXELS) ** (1 / 3))
    values = channel[::step, ::step, ::step].astype(float)
    values = values[values != 0]
    found, counts = np.unique(values, return_counts=True)
    if len(found) > 1 and counts.max() > COMMON * len(values):
        values = values[values != found[counts.argmax()]]
    return tuple(map(float, np.percentile(values, PERCENTILES))) if len(values) else (0.0,) * 7


def summarize(found: Sequence[Statistics]) -> TrainingStatistics:
    """Over the training cases."""
    features = np.array([[_features(levels) for levels in one.levels] for one in found])
    spacing, extent, offsets = (
        _rows(np.stack([a.min(0), np.median(a, 0), a.max(0)], axis=1))
        for a in (
            np.array([one.spacing_mm for one in found]),
            np.array([one.extent_mm for one in found]),
            features[..., 1],
        )
    )
    return TrainingStatistics(
        cases=len(found),
        spacing_mm=spacing,
        extent_mm=extent,
        spreads=tuple(
            _ranges([_spread(one.levels[c]) for one in found]) for c in range(features.shape[1])
        ),
        offsets=offsets,
        means=_rows(features.mean(0)),
        deviations=_rows(features.std(0)),
        swaps=tuple(_swaps(features)),
    )


def differences(
    one: Statistics, training: TrainingStatistics, channels: Sequence[str], normalize: Sequence[str]
) -> list[str]:
    """In what a case is unlike the training cases, in words; `normalize` is each channel's."""
    said = []
    for what, sizes, ranges, factor in (
        ("spacing", one.spacing_mm, training.spacing_mm, SPACING),
        ("size", one.extent_mm, training.extent_mm, EXTENT),
    ):
        pairs = list(zip(sizes, ranges, strict=True))
        if any(not low / factor <= size <= high * factor for size, (low, _, high) in pairs):
            said.append(
                f"{what} {' x '.join(f'{size:.4g}' for size in sizes)} mm (training: "
                f"{' x '.join(_between(low, high) for _, (low, _, high) in pairs)})"
            )
    order = _order(one, training)
    if order is not None:
        looks = ", ".join(channels[c] for c in order)
        expected = ", ".join(channels)
        return [
            *said,
            f"channels seem to be in another order: expected {expected}, they look like {looks}",
        ]
    for c, name in enumerate(channels):
        levels, spread = one.levels[c], _spread(one.levels[c])
        values = f"{name} has values of {_between(levels[1], levels[5])}"
        if not any(low / SPREAD <= spread <= high * SPREAD for low, high in training.spreads[c]):
            known = " or ".join(_between(low, high) for low, high in training.spreads[c])
            factor = normalize[c if len(normalize) > 1 else 0].startswith("zscore")
            said.append(
                f"{values}, a spread of {_number(spread)} (training: {known}"
                + ("; normalization takes out a mere factor)" if factor else ")")
            )
            continue
        low, _, high = training.offsets[c]
        offset = _features(levels)[1]
        if not low - max(OFFSET, high - low) <= offset <= high + max(OFFSET, high - low):
            said.append(
                f"{values}, a median of {offset:.2g} times their spread "
                f"(training: {low:.2g}..{high:.2g} times)"
            )
    return said


def _spread(levels: Levels) -> float:
    """From the percentile 5 to 95."""
    return levels[5] - levels[1]


def _features(levels: Levels) -> list[float]:
    """The spread's magnitude, the median in spreads, then the histogram's shape."""
    median, spread = levels[3], max(_spread(levels), 1e-12)
    others = [(levels[n] - median) / spread for n in (0, 2, 4, 5, 6)]
    magnitude = np.log10(spread)
    return [float(magnitude), *(float(np.clip(f, -9, 9)) for f in (median / spread, *others))]


FEATURES = len(_features((0.0,) * len(PERCENTILES)))


def _ranges(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Ranges that hold all values; between two of them is a gap in which a scan is a stranger.

    >>> _ranges([80, 70, 500, 101, 1e5])
    ((70, 101), (500, 500), (100000.0, 100000.0))
    """
    ordered = sorted(values)
    ends = [(a, b) for a, b in pairwise(ordered) if b > a * SPREAD**2 or (b > a and a <= 0)]
    lows, highs = [ordered[0], *(b for _, b in ends)], [*(a for a, _ in ends), ordered[-1]]
    return tuple(zip(lows, highs, strict=True))


def _costs(features: np.ndarray, means: np.ndarray, deviations: np.ndarray) -> np.ndarray:
    """(C, C): how badly a scan's channel (row) fits a channel of the training (column)."""
    off = (features[:, None] - means[None]) / np.maximum(deviations, FLOOR)[None]
    return np.minimum(off**2, CAP).sum(-1)


def _gain(costs: np.ndarray, i: int, j: int) -> float:
    """How much better two channels fit when they are swapped."""
    return float(costs[i, i] + costs[j, j] - costs[i, j] - costs[j, i])


def _swaps(features: np.ndarray) -> Iterator[tuple[float, ...]]:
    """(N, C, F) -> pairs of channels that the training cases tell apart, each with a threshold.

    Each case is judged by the others: where one in twenty hardly fits its own order better, a scan
    cannot be told to be in another.
    """
    if len(features) < 4:
        return
    count = len(features) - 1
    means = (features.sum(0) - features) / count  # of the others, for each case
    squares = ((features - features.mean(0)) ** 2).sum(0)
    variances = (squares - (features - features.mean(0)) ** 2 * (count + 1) / count) / count
    deviations = np.sqrt(np.maximum(variances, 0))
    costs = [_costs(*case) for case in zip(features, means, deviations, strict=True)]
    for i, j in combinations(range(features.shape[1]), 2):
        gains = np.array([_gain(c, i, j) for c in costs])
        margin = -float(np.percentile(gains, 95))
        threshold = max(margin / 2, float(gains.max()))
        if margin > max(EVIDENCE, threshold):
            yield i, j, threshold


def _order(one: Statistics, training: TrainingStatistics) -> list[int] | None:
    """Which channel of the training each channel looks like, if that is clearly another order."""
    from scipy.optimize import linear_sum_assignment

    features = np.array([_features(levels) for levels in one.levels])
    costs = _costs(features, np.array(training.means), np.array(training.deviations))
    if not any(_gain(costs, int(i), int(j)) > t for i, j, t in training.swaps):
        return None
    order = [int(c) for c in linear_sum_assignment(costs)[1]]
    return order if order != sorted(order) else None


def _between(low: float, high: float) -> str:
    least, most = _number(low), _number(high)
    return least if least == most else f"{least}..{most}"


def _number(value: float) -> str:
    """In digits, as far as there are not too many.

    >>> _number(1234567.8), _number(12.3456)
    ('1,234,568', '12.35')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _rows(array: np.ndarray) -> Any:
    return _tuples(array.tolist())


def _leaves(value: Any) -> Iterator[Any]:
    if not isinstance(value, tuple):
        yield value
    else:
        for inner in value:
            yield from _leaves(inner)


def _lists(value: Any) -> Any:
    return [_lists(v) for v in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
