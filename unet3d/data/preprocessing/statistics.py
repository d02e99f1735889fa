"""Summarize the training cases before normalization, and find scans that differ from them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np

from unet3d.types import FloatTriple

PERCENTILES = (5, 50, 95)

MAX_VOXELS = 40**3  # voxels per channel that are sampled, which takes milliseconds and a few MiB
BACKGROUND_FRACTION = 0.1
"""A value with more than this fraction of the voxels counts as background, as 0 does."""

SPACING_FACTOR, EXTENT_FACTOR, SPREAD_FACTOR, OFFSET_MARGIN = 1.5, 2.0, 2.0, 0.5
"""Tolerance beyond the range of the training cases: factors, and a margin in spreads."""

MAX_OFFSET = 9.0  # spreads

Percentiles = tuple[float, ...]
"""The values at PERCENTILES of a channel's voxels without background."""


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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainingStatistics":
        """Return what `to_dict` has returned; older checkpoints hold more."""
        return cls(**{field.name: to_tuples(values[field.name]) for field in fields(cls)})

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
    if not len(values):
        return (0.0,) * len(PERCENTILES)
    return tuple(map(float, np.percentile(values, PERCENTILES)))


def summarize_statistics(cases: Sequence[Statistics]) -> TrainingStatistics:
    """Compute the statistics over the training cases."""
    channels = range(len(cases[0].percentiles))
    return TrainingStatistics(
        cases=len(cases),
        spacing_mm=_summarize([case.spacing_mm for case in cases]),
        extent_mm=_summarize([case.extent_mm for case in cases]),
        intensity_spreads=tuple(
            _find_ranges([_get_spread(case.percentiles[c]) for case in cases]) for c in channels
        ),
        intensity_offsets=_summarize(
            [[_get_offset(case.percentiles[c]) for c in channels] for case in cases]
        ),
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
    for c, name in enumerate(channels):
        percentiles, spread = case.percentiles[c], _get_spread(case.percentiles[c])
        values = f"{name} has values of {_format_range(percentiles[0], percentiles[-1])}"
        ranges = training.intensity_spreads[c]
        if not any(low / SPREAD_FACTOR <= spread <= high * SPREAD_FACTOR for low, high in ranges):
            expected = " or ".join(_format_range(low, high) for low, high in ranges)
            is_scaled = normalize[c if len(normalize) > 1 else 0].startswith("zscore")
            note = "; normalization removes a constant factor" if is_scaled else ""
            messages.append(
                f"{values}, a spread of {_format_number(spread)} "
                f"(training: a spread of {expected}{note})"
            )
            continue
        low, _, high = training.intensity_offsets[c]
        offset, margin = _get_offset(percentiles), max(OFFSET_MARGIN, high - low)
        if not low - margin <= offset <= high + margin:
            more = " or more" if abs(offset) == MAX_OFFSET else ""
            messages.append(
                f"{values}, a median of {offset:.2g}{more} times their spread "
                f"(training: {low:.2g}..{high:.2g} times)"
            )
    return messages


def _get_spread(percentiles: Percentiles) -> float:
    return percentiles[-1] - percentiles[0]


def _get_offset(percentiles: Percentiles) -> float:
    """Return the median in spreads, at most MAX_OFFSET of them."""
    offset = percentiles[1] / max(_get_spread(percentiles), 1e-12)
    return float(np.clip(offset, -MAX_OFFSET, MAX_OFFSET))


def _summarize(rows: Sequence[Sequence[float]]) -> tuple[FloatTriple, ...]:
    """Return the minimum, the median and the maximum of each column."""
    return to_tuples(np.percentile(rows, (0, 50, 100), axis=0).T.tolist())


def _find_ranges(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Return ranges that hold all values, separated where neighbors differ by a large factor.

    >>> _find_ranges([80, 70, 500, 101, 1e5])
    ((70, 101), (500, 500), (100000.0, 100000.0))
    """
    ordered = sorted(values)
    gaps = [(a, b) for a, b in pairwise(ordered) if b > a * SPREAD_FACTOR**2 or (b > a and a <= 0)]
    lows, highs = [ordered[0], *(b for _, b in gaps)], [*(a for a, _ in gaps), ordered[-1]]
    return tuple(zip(lows, highs, strict=True))


def _format_range(low: float, high: float) -> str:
    ends = _format_number(low), _format_number(high)
    return ends[0] if ends[0] == ends[1] else f"{ends[0]}..{ends[1]}"


def _format_number(value: float) -> str:
    """Format with four significant digits, or all integer digits below 1e9.

    >>> _format_number(1234567.8), _format_number(12.3456)
    ('1,234,568', '12.35')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def to_lists(value: Any) -> Any:
    """Convert nested tuples to lists, for JSON and checkpoints."""
    return [to_lists(v) for v in value] if isinstance(value, tuple) else value


def to_tuples(value: Any) -> Any:
    """Convert nested lists to tuples."""
    return tuple(to_tuples(v) for v in value) if isinstance(value, list) else value
