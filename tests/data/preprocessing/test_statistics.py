from dataclasses import replace

import numpy as np
import pytest

from unet3d.data.preprocessing.statistics import (
    Statistics,
    TrainingStatistics,
    describe_differences,
    measure_percentiles,
    summarize_statistics,
)


def make_case(seed, channels=1):
    rng = np.random.default_rng(seed)
    volumes = [rng.normal(500, 100, (12, 12, 12)) * rng.uniform(0.7, 1.4) for _ in range(channels)]
    percentiles = tuple(map(measure_percentiles, volumes))
    sizes = {"spacing_mm": (1.0, 1.0, 2.0), "extent_mm": (30.0, 40.0, 50.0)}
    return Statistics(**sizes, percentiles=percentiles)


def make_training(count=8, channels=1):
    return summarize_statistics([make_case(seed, channels) for seed in range(count)])


def describe(case, training, channels=("T1",)):
    return "; ".join(describe_differences(case, training, channels, ["zscore"]))


def scale(case, factor=1.0, shift=0.0):
    percentiles = tuple(tuple(v * factor + shift for v in c) for c in case.percentiles)
    return replace(case, percentiles=percentiles)


def test_percentiles_are_measured_without_background():
    values = np.zeros((20, 20, 20))
    values[5:15, 5:15, 5:15] = np.arange(1000).reshape(10, 10, 10) + 1
    median = np.percentile(np.arange(1000) + 1, 50)
    assert measure_percentiles(values)[1] == pytest.approx(median)
    values[values == 0] = -4  # like a dataset that was normalized before it was published
    assert measure_percentiles(values)[1] == pytest.approx(median)
    assert measure_percentiles(np.zeros((3, 3, 3))) == (0.0,) * 3


def test_cases_like_the_training_cases_have_no_differences():
    training = make_training(channels=2)
    assert TrainingStatistics.from_dict(training.to_dict()) == training
    sizes = {"spacing_mm": (1.4, 0.8, 1.5), "extent_mm": (50.0, 30.0, 90.0)}  # a bit beyond theirs
    cases = [replace(make_case(seed, 2), **sizes) for seed in range(100, 120)]
    assert [describe(case, training, ("T1", "T2")) for case in cases] == [""] * 20


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda case: replace(case, spacing_mm=(1.0, 1.0, 5.0)), "spacing 1 x 1 x 5 mm (training"),
        (lambda case: replace(case, extent_mm=(30.0, 90.0, 50.0)), "size 30 x 90 x 50 mm (train"),
        (lambda case: scale(case, 1000), "T1 has values of"),
        (lambda case: scale(case, 0.01), "normalization removes a constant factor"),
        (lambda case: scale(case, shift=-1024), "times their spread (training: "),
        (lambda case: scale(case, shift=1e7), "a median of 9 or more times their spread (trai"),
    ],
)
def test_a_case_unlike_the_training_cases_is_described_with_both_values(change, expected):
    assert expected in describe(change(make_case(99)), make_training())


def test_one_training_case_and_empty_scans_are_supported():
    empty = replace(make_case(99), percentiles=((0.0,) * 3,))
    assert "a spread of 0" in describe(empty, make_training(count=1))
    assert describe(empty, summarize_statistics([empty, empty])) == ""
