import math

from unet3d.report.curves import MAX_POINTS, Curve


def make_curve(steps):
    curve = Curve()
    for step in range(steps):
        curve.add(step, 3 * step)
    return curve


def test_a_long_curve_has_few_points_that_are_means_of_equally_many_values():
    curve = make_curve(10_000)
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


def test_values_that_cannot_be_drawn_are_left_out():
    curve = Curve()
    for value in (1.0, math.nan, math.inf, 2.0):
        curve.add(0, value)
    assert curve.list_points() == [[0, 1.0], [0, 2.0]]
