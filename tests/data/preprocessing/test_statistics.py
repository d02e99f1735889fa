from dataclasses import replace

import numpy as np
import pytest

from unet3d.data.preprocessing.statistics import (
    Statistics,
    TrainingStatistics,
    differences,
    measure,
    summarize,
)


def volume(seed, kind=0):
    """Voxels of a modality: a symmetric histogram, or one with a long bright tail."""
    rng = np.random.default_rng(seed)
    drawn = (rng.normal(500, 100, (12, 12, 12)), rng.gamma(2, 100, (12, 12, 12)))[kind]
    return drawn * rng.uniform(0.7, 1.4)


def case(seed, *kinds):
    levels = tuple(measure(volume(seed * 9 + kind, kind)) for kind in kinds or (0,))
    return Statistics(spacing_mm=(1.0, 1.0, 2.0), extent_mm=(30.0, 40.0, 50.0), levels=levels)


def training(*kinds, count=8):
    return summarize([case(seed, *kinds) for seed in range(count)])


def said(one, known, channels=("T1",)):
    return "; ".join(differences(one, known, channels, ["zscore"]))


def changed(one, factor=1.0, shift=0.0):
    return replace(one, levels=tuple(tuple(v * factor + shift for v in c) for c in one.levels))


def test_percentiles_are_those_of_voxels_that_are_no_background():
    values = np.zeros((20, 20, 20))
    values[5:15, 5:15, 5:15] = np.arange(1000).reshape(10, 10, 10) + 1
    inside = np.percentile(np.arange(1000) + 1, 50)
    assert measure(values)[3] == pytest.approx(inside)
    values[values == 0] = -4  # as of a set that was normalized before it was published
    assert measure(values)[3] == pytest.approx(inside)
    assert measure(np.zeros((3, 3, 3))) == (0.0,) * 7


def test_a_large_volume_is_measured_by_some_of_its_voxels():
    values = np.random.default_rng(0).normal(50, 10, (130, 130, 130))
    assert measure(values) == pytest.approx(np.percentile(values, (1, 5, 25, 50, 75, 95, 99)), 0.03)


def test_cases_like_those_of_the_training_are_not_warned_of():
    known = training(0, 1)
    assert [said(case(seed, 0, 1), known, ("T1", "T2")) for seed in range(100, 120)] == [""] * 20


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda one: replace(one, spacing_mm=(1.0, 1.0, 5.0)),
            "spacing 1 x 1 x 5 mm (training: 1 ",
        ),
        (lambda one: replace(one, extent_mm=(30.0, 90.0, 50.0)), "size 30 x 90 x 50 mm (training"),
        (lambda one: replace(one, extent_mm=(30.0, 19.0, 50.0)), "size 30 x 19 x 50 mm (training"),
        (lambda one: changed(one, 1000), "T1 has values of"),
        (lambda one: changed(one, 0.01), "normalization takes out a mere factor"),
        (lambda one: changed(one, shift=-1024), "times their spread (training: "),
    ],
)
def test_a_case_beyond_the_training_cases_is_told_with_both_figures(change, expected):
    assert said(case(99), training()) == ""
    assert expected in said(change(case(99)), training())


def test_between_two_scales_of_intensities_lies_none():
    known = summarize([changed(case(n), 1000 ** (n % 2)) for n in range(8)])
    assert [said(changed(case(99), f), known) == "" for f in (1, 30, 1000)] == [True, False, True]


def test_channels_in_another_order_are_told_with_the_order_that_is_expected():
    swapped = case(99, 1, 0)
    assert said(swapped, training(0, 1), ("FLAIR", "T1c")) == (
        "channels seem to be in another order: expected FLAIR, T1c, they look like T1c, FLAIR"
    )


def test_channels_that_look_alike_are_in_no_order():
    one = replace(case(99), levels=case(99).levels + case(98).levels)
    pairs = [replace(case(n), levels=case(n).levels + case(n + 50).levels) for n in range(8)]
    known = summarize(pairs)
    assert known.swaps == ()
    assert said(one, known, ("T1", "T1 again")) == ""


def test_few_training_cases_and_empty_scans_are_no_trouble():
    empty = replace(case(99), levels=((0.0,) * 7,))
    assert "a spread of 0" in said(empty, training(count=1))
    assert said(empty, summarize([empty, empty])) == ""


def test_plain_values_give_the_same_statistics():
    known = training(0, 1)
    assert TrainingStatistics.from_dict(known.to_dict(), 2) == known
    with pytest.raises(ValueError, match="are not of its channels"):
        TrainingStatistics.from_dict(known.to_dict(), 1)
