"""Curves of a run in few points, and the loss over a rising learning rate."""

import math

from unet3d.report.curves import MAX_POINTS, Curve, LRCurve


def make_curve(steps):
    curve = Curve()
    for step in range(steps):
        curve.add(step, 3 * step)
    return curve


def test_a_long_curve_has_few_points_that_are_means_of_equally_many_values():
    curve = make_curve(10_000)
    curve.add(10_000, math.nan)  # is left out
    points = curve.list_points()
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    assert points[0] == [15.5, 46.5]
    assert curve.every == 32
    assert all(y == 3 * x for x, y in points)
    assert points[-1][0] == (9984 + 9999) / 2  # the incomplete point


def test_a_restored_curve_continues_as_if_it_had_not_stopped():
    restored = Curve()
    restored.load_state_dict(make_curve(700).state_dict())
    for step in range(700, 2000):
        restored.add(step, 3 * step)
    assert restored.list_points() == make_curve(2000).list_points()


def try_rates(loss_of_step, steps=100):
    curve = LRCurve()
    for step in range(steps):
        curve.add(10 ** (-6 + 6 * step / (steps - 1)), loss_of_step(step))
        if curve.has_diverged:
            break
    return curve


def test_the_rate_at_which_the_loss_falls_fastest_is_suggested_and_marked():
    curve = try_rates(lambda step: 1 - 0.8 / (1 + math.exp((60 - step) / 4)))
    at = curve.rates.index(curve.suggestion)
    assert 58 <= at <= 66  # the moving average lags
    labels = [text.get_text() for text in curve.plot("x").axes[0].get_legend().get_texts()]
    assert labels[-1] == f"suggested: {curve.suggestion:.1e}"


def test_a_loss_that_rises_suggests_nothing_and_two_steps_are_enough():
    assert try_rates(lambda step: 1 + step / 100).suggestion is None
    assert try_rates(lambda step: 1 / (1 + step), steps=2).suggestion == 1e-6


def test_a_loss_that_jumps_has_diverged():
    assert len(try_rates(lambda step: 1.0 if step < 50 else 40.0).losses) == 51
