from dataclasses import replace

import numpy as np
import pytest

from unet3d.data.preprocessing.statistics import (
    MAX_COST,
    MIN_STD,
    Statistics,
    TrainingStatistics,
    describe_differences,
    measure_percentiles,
    summarize_statistics,
)


def draw_volume(seed, kind=0):
    """Draw a modality: a symmetric histogram (0), or one with a long bright tail (1)."""
    rng = np.random.default_rng(seed)
    values = (rng.normal(500, 100, (12, 12, 12)), rng.gamma(2, 100, (12, 12, 12)))[kind]
    return values * rng.uniform(0.7, 1.4)


def make_case(seed, *kinds):
    volumes = [draw_volume(seed * 9 + kind, kind) for kind in kinds or (0,)]
    percentiles = tuple(map(measure_percentiles, volumes))
    sizes = {"spacing_mm": (1.0, 1.0, 2.0), "extent_mm": (30.0, 40.0, 50.0)}
    return Statistics(**sizes, percentiles=percentiles)


def make_training(*kinds, count=8):
    return summarize_statistics([make_case(seed, *kinds) for seed in range(count)])


def describe(case, training, channels=("T1",)):
    return "; ".join(describe_differences(case, training, channels, ["zscore"]))


def scale(case, factor=1.0, shift=0.0):
    percentiles = tuple(tuple(v * factor + shift for v in c) for c in case.percentiles)
    return replace(case, percentiles=percentiles)


def test_percentiles_are_measured_without_background():
    values = np.zeros((20, 20, 20))
    values[5:15, 5:15, 5:15] = np.arange(1000).reshape(10, 10, 10) + 1
    median = np.percentile(np.arange(1000) + 1, 50)
    assert measure_percentiles(values)[3] == pytest.approx(median)
    values[values == 0] = -4  # like a dataset that was normalized before it was published
    assert measure_percentiles(values)[3] == pytest.approx(median)
    assert measure_percentiles(np.zeros((3, 3, 3))) == (0.0,) * 7


def test_cases_like_the_training_cases_have_no_differences():
    training = make_training(0, 1)
    cases = [make_case(seed, 0, 1) for seed in range(100, 120)]
    assert [describe(case, training, ("T1", "T2")) for case in cases] == [""] * 20


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda case: replace(case, spacing_mm=(1.0, 1.0, 5.0)), "spacing 1 x 1 x 5 mm (training"),
        (lambda case: replace(case, extent_mm=(30.0, 90.0, 50.0)), "size 30 x 90 x 50 mm (train"),
        (lambda case: replace(case, extent_mm=(30.0, 19.0, 50.0)), "size 30 x 19 x 50 mm (train"),
        (lambda case: scale(case, 1000), "T1 has values of"),
        (lambda case: scale(case, 0.01), "normalization removes a constant factor"),
        (lambda case: scale(case, shift=-1024), "times their spread (training: "),
    ],
)
def test_a_case_unlike_the_training_cases_is_described_with_both_values(change, expected):
    assert describe(make_case(99), make_training()) == ""
    assert expected in describe(change(make_case(99)), make_training())


def test_swapped_channels_are_described_with_the_expected_order():
    expected = "channels seem to be in a different order: expected FLAIR, T1c, found T1c, FLAIR"
    assert describe(make_case(99, 1, 0), make_training(0, 1), ("FLAIR", "T1c")) == expected


def test_one_training_case_and_empty_scans_are_supported():
    empty = replace(make_case(99), percentiles=((0.0,) * 7,))
    assert "a spread of 0" in describe(empty, make_training(count=1))
    assert describe(empty, summarize_statistics([empty, empty])) == ""


def test_statistics_can_be_restored_from_plain_values():
    training = make_training(0, 1)
    assert TrainingStatistics.from_dict(training.to_dict()) == training


def test_a_swap_threshold_comes_from_comparing_each_case_with_the_others():
    cases, gains = [make_case(seed, 0, 1) for seed in range(8)], []
    for n, case in enumerate(cases):
        others = summarize_statistics(cases[:n] + cases[n + 1 :])
        features = np.array(summarize_statistics([case]).feature_means)
        stds = np.maximum(others.feature_stds, MIN_STD)
        distances = (features[:, None] - np.array(others.feature_means)) / stds
        costs = np.minimum(distances**2, MAX_COST).sum(-1)
        gains.append(costs.trace() - costs[::-1].trace())
    expected = max(-np.percentile(gains, 95) / 2, *gains)
    (threshold,) = summarize_statistics(cases).swap_thresholds
    assert threshold == pytest.approx((0, 1, expected))
