import math

import numpy as np
import pytest

from unet3d.metric.bootstrap import compute_bootstrap_difference, compute_bootstrap_means

NAN = math.nan


def test_a_class_is_averaged_over_its_cases_and_the_classes_over_their_means():
    per_class, overall = compute_bootstrap_means(
        np.array([[1.0, 0.2], [0.5, NAN], [0.0, 0.6], [0.3, NAN]])
    )
    assert [c["mean"] for c in per_class] == pytest.approx([0.45, 0.4])
    assert [c["median"] for c in per_class] == pytest.approx([0.4, 0.4])
    assert [c["cases"] for c in per_class] == [4, 2]
    assert overall["mean"] == pytest.approx(0.425)


def test_the_interval_equals_scipys_percentile_bootstrap():
    from scipy.stats import bootstrap

    values = np.random.default_rng(0).beta(8, 2, 40)
    (single,), overall = compute_bootstrap_means(values[:, None])
    interval = bootstrap((values,), np.mean, n_resamples=10_000, method="percentile")
    expected = (interval.confidence_interval.low, interval.confidence_interval.high)
    assert (single["low"], single["high"]) == pytest.approx(expected, abs=3e-3)
    assert (overall["low"], overall["high"]) == (single["low"], single["high"])


def test_one_case_or_group_has_a_mean_but_no_interval():
    (one, none), overall = compute_bootstrap_means(np.array([[0.5, NAN]]))
    assert (one["mean"], one["cases"], none["cases"], overall["mean"]) == (0.5, 1, 0, 0.5)
    assert all(math.isnan(x["low"]) and math.isnan(x["high"]) for x in (one, none, overall))
    assert math.isnan(none["mean"])
    (group,), _ = compute_bootstrap_means(np.array([[0.2], [0.4]]), ["a", "a"])
    assert math.isnan(group["low"])


def test_resamples_without_the_class_do_not_count():
    rare = np.full((20, 1), NAN)
    rare[:3, 0] = (0.2, 0.3, 0.4)
    (single,), _ = compute_bootstrap_means(rare)
    assert (single["low"], single["high"]) == pytest.approx((0.2, 0.4))


def test_cases_of_a_group_are_resampled_together():
    """Four scans of each patient that score alike say no more than one scan of each."""
    patients = np.random.default_rng(0).beta(8, 2, (12, 2))
    patients[:3, 1] = NAN
    names = [f"p{n:02d}" for n in range(12)]
    alone, overall = compute_bootstrap_means(patients)
    scans, overall_scans = compute_bootstrap_means(np.repeat(patients, 4, 0), np.repeat(names, 4))
    for one, four in zip(alone, scans, strict=True):
        assert [four[key] for key in ("mean", "low", "high")] == pytest.approx(
            [one[key] for key in ("mean", "low", "high")]
        )
        assert (four["cases"], four["groups"]) == (4 * one["cases"], one["cases"])
    assert overall_scans == pytest.approx(overall)
    assert "groups" not in alone[0]


def test_groups_of_other_sizes_count_by_their_cases():
    values = np.array([[0.2], [0.4], [0.6], [0.9]])
    (single,), _ = compute_bootstrap_means(values, ["a", "a", "b", "c"])
    assert single["mean"] == pytest.approx(0.525)
    assert (single["low"], single["high"]) == pytest.approx((0.3, 0.9))
    (single,), _ = compute_bootstrap_means(values, ["a", "a", "b", "b"])
    assert math.isnan(single["low"])  # whose resamples have three means alone


def test_the_mean_over_classes_is_that_of_all_of_them_in_each_resample():
    values = np.random.default_rng(0).normal(0.9, 0.02, (15, 2))
    values[:, 1] = NAN
    values[:3, 1] = (0.2, 0.25, 0.3)
    (_, rare), overall = compute_bootstrap_means(values)
    assert overall["mean"] == pytest.approx(np.nanmean(values, 0).mean())
    assert overall["low"] < overall["mean"] < overall["high"] < (0.93 + rare["high"]) / 2
    never = np.array([[0.5, NAN], [NAN, 0.2], [NAN, 0.2]])
    overall = compute_bootstrap_means(never)[1]
    assert overall["low"] == overall["high"] == overall["mean"] == pytest.approx(0.35)


def test_a_difference_is_that_of_the_means_also_where_one_has_no_score():
    values, others = np.random.default_rng(0).uniform(size=(2, 12, 2))
    values[3, 1], values[5, 0], others[5, 0] = NAN, NAN, NAN
    found = compute_bootstrap_difference(values, others)
    means = [compute_bootstrap_means(scores)[1]["mean"] for scores in (values, others)]
    assert found["mean"] == pytest.approx(means[0] - means[1])
    assert found["low"] < found["mean"] < found["high"]
    paired = compute_bootstrap_difference(others + 0.125, others)
    assert list(paired.values()) == pytest.approx([0.125] * 3)
