"""The loss over a rising learning rate."""

import math

import pytest

from unet3d.report.lr_curve import LRCurve


def make_curve(loss_of_step, steps=100):
    curve = LRCurve()
    for step in range(steps):
        curve.add(10 ** (-6 + 6 * step / (steps - 1)), loss_of_step(step))
        if curve.has_diverged:
            break
    return curve


def test_the_rate_at_which_the_loss_falls_fastest_is_suggested_and_marked():
    curve = make_curve(lambda step: 1 - 0.8 / (1 + math.exp((60 - step) / 4)))
    at = curve.rates.index(curve.suggestion)
    assert 58 <= at <= 66  # the moving average lags
    labels = [text.get_text() for text in curve.plot("x").axes[0].get_legend().get_texts()]
    assert labels[-1] == f"suggested: {curve.suggestion:.1e}"


def test_a_loss_that_rises_suggests_nothing():
    assert make_curve(lambda step: 1 + step / 100).suggestion is None


def test_a_test_ends_when_the_loss_diverges():
    curve = make_curve(lambda step: 1.0 if step < 50 else 40.0)
    assert curve.has_diverged
    assert len(curve.losses) == 51
    assert curve.suggestion is None or curve.suggestion <= curve.rates[50]


@pytest.mark.parametrize("steps", [2, 5])
def test_a_curve_of_few_steps_suggests_nothing_or_one_of_its_rates(steps):
    curve = make_curve(lambda step: 1 / (1 + step), steps=steps)
    assert curve.suggestion is None or curve.suggestion in curve.rates
