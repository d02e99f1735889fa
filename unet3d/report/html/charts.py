"""Draw charts as SVG, in the colors of the page and with a title on hover."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from unet3d.report.html.elements import Html, join, tag

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 40
"""Pixels of the margins, where the labels are."""

MAX_HOVERS = 120
"""Places of a chart of curves that say the values there."""

Point = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve, or a layer of an area chart: (x, y) by x."""

    name: str
    points: Sequence[Point]
    color: str


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Values of one name, their mean and its interval."""

    name: str
    color: str
    values: Sequence[tuple[str, float]]  # what they belong to, for the titles
    mean: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point with a name."""

    name: str
    color: str
    x: float
    y: float
    interval: tuple[float, float] | None = None  # of y


class Scale:
    """Map values of an axis to pixels."""

    def __init__(self, low: float, high: float, start: float, stop: float):
        self.low, self.high = low, high if high > low else low + 1
        self.start, self.stop = start, stop

    def __call__(self, value: float) -> float:
        """Return the pixel of a value, rounded."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)


def list_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers within an interval.

    >>> list_ticks(0, 0.93), list_ticks(0, 1300)
    ([0.0, 0.2, 0.4, 0.6, 0.8], [0.0, 250.0, 500.0, 750.0, 1000.0, 1250.0])
    """
    span = high - low if high > low else 1.0
    unit = 10 ** math.floor(math.log10(span / count))
    step = next(n * unit for n in (1, 2, 2.5, 5, 10) if span / (n * unit) <= count + 0.5)
    first = math.ceil(low / step - 1e-9)
    last = math.floor((low + span) / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def format_value(value: float) -> str:
    """Return a number in few digits.

    >>> format_value(1234567.0), format_value(0.88854), format_value(0.00003)
    ('1,234,567', '0.8885', '3e-05')
    """
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def draw_curves(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,
) -> Html:
    """Draw curves over x from 0, with their legend; above each x the values of all of them."""
    xs = [point[0] for s in series for point in s.points]
    ys = [point[1] for s in series for point in s.points]
    low, high = y_range or pad_range(min(ys), max(ys))
    x, y = make_scales(0, max(xs), low, high)
    lines = []
    for s in series:
        path = " ".join(f"{x(p[0])},{y(p[1])}" for p in s.points)
        lines.append(tag("polyline", points=path, fill="none", stroke=s.color, stroke_width=1.8))
        if len(s.points) < 12:
            lines += [tag("circle", cx=x(p[0]), cy=y(p[1]), r=3, fill=s.color) for p in s.points]
    hovers = make_hovers(series, x, x_label)
    chart = make_chart(x, y, x_label, y_label, [*lines, *hovers])
    return tag("figure", chart, make_legend(series) if len(series) > 1 else "")


def make_hovers(series: Sequence[Series], x: Scale, x_label: str) -> list[Html]:
    """Return invisible columns with the values of all curves as their titles."""
    places = sorted({point[0] for s in series for point in s.points})
    places = places[:: math.ceil(len(places) / MAX_HOVERS)]
    edges = [
        x.start,
        *((x(a) + x(b)) / 2 for a, b in pairwise(places)),
        x.stop,
    ]
    columns = []
    for place, left, right in zip(places, edges, edges[1:], strict=False):
        near = [(s.name, min(s.points, key=lambda p: abs(p[0] - place))) for s in series]
        text = "\n".join(f"{name}: {format_value(point[1])}" for name, point in near)
        columns.append(
            tag(
                "rect",
                tag("title", f"{x_label} {format_value(round(place))}\n{text}"),
                class_="hover",
                x=round(left, 1),
                y=TOP,
                width=round(right - left, 1),
                height=HEIGHT - TOP - BOTTOM,
            )
        )
    return columns


def draw_areas(
    layers: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    spans: Sequence[tuple[str, float, float]],
    levels: Sequence[tuple[str, float, float, float]] = (),
) -> Html:
    """Stack layers of the same x; name spans of x, and draw levels (name, start, stop, y)."""
    xs = [point[0] for point in layers[0].points]
    totals = [
        sum(column) for column in zip(*([p[1] for p in s.points] for s in layers), strict=True)
    ]
    top = max([*totals, *(level for *_, level in levels)])
    x, y = make_scales(xs[0], xs[-1], 0, 1.12 * top, width=2 * WIDTH, height=300)
    shapes, below = [], [0.0] * len(xs)
    for s in layers:
        above = [base + p[1] for base, p in zip(below, s.points, strict=True)]
        path = [*step_path(x, y, xs, above), *step_path(x, y, xs, below)[::-1]]
        name = tag("title", f"{s.name}: at most {format_value(max(p[1] for p in s.points))}")
        shapes.append(tag("polygon", name, points=" ".join(path), fill=s.color))
        below = above
    for name, start, stop in spans:
        shapes.append(tag("line", class_="phase", x1=x(start), x2=x(start), y1=TOP, y2=y(0)))
        if x(stop) - x(start) > 7 * len(name):
            shapes.append(tag("text", name, class_="label", x=x(start) + 5, y=TOP + 12))
    for name, start, stop, level in levels:
        position = {"x1": x(start), "x2": x(stop), "y1": y(level), "y2": y(level)}
        shapes.append(tag("line", tag("title", name), class_="level", **position))
    peak = totals.index(max(totals))
    shapes.append(tag("circle", class_="peak", cx=x(xs[peak]), cy=y(totals[peak]), r=4))
    anchor = "start" if peak < 0.7 * len(xs) else "end"
    label = f"peak {totals[peak]:.{0 if totals[peak] >= 100 else 1}f}"
    offset = 8 if anchor == "start" else -8
    shapes.append(
        tag(
            "text",
            label,
            class_="strong",
            x=x(xs[peak]) + offset,
            y=y(totals[peak]) - 8,
            text_anchor=anchor,
        )
    )
    chart = make_chart(x, y, x_label, y_label, shapes, ticks_of_x=False)
    return tag("figure", chart, make_legend(layers), class_="wide")


def step_path(x: Scale, y: Scale, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    """Return the corners of a curve that keeps each value until the next one."""
    corners = [f"{x(xs[0])},{y(ys[0])}"]
    for n in range(1, len(xs)):
        corners += [f"{x(xs[n])},{y(ys[n - 1])}", f"{x(xs[n])},{y(ys[n])}"]
    return corners


def draw_spreads(spreads: Sequence[Spread], *, x_label: str) -> Html:
    """Draw a row per name: every value as a dot, the mean and its interval over them."""
    values = [v for s in spreads for _, v in s.values]
    longest = max(len(s.name) for s in spreads)
    left, height = min(max(LEFT, 7 * longest + 20), 220), 46 * len(spreads) + BOTTOM + TOP
    low, high = round_range(values or [0.0, 1.0])
    x = Scale(low, high, left, 2 * WIDTH - RIGHT)
    shapes = draw_x_axis(x, x_label, height)
    for row, s in enumerate(spreads):
        middle = TOP + 46 * row + 23
        shapes.append(tag("text", shorten(s.name), class_="name", x=left - 12, y=middle + 4))
        for n, (case, value) in enumerate(s.values):
            jitter = (n * 0.618) % 1 - 0.5  # spreads dots without chance
            dot = {"cx": x(value), "cy": round(middle + 22 * jitter, 1), "r": 3, "fill": s.color}
            name = tag("title", f"{case}\n{s.name}: {value:.4f}")
            shapes.append(tag("circle", name, class_="dot", **dot))
        if s.interval is not None:
            low, high = s.interval
            name = tag("title", f"mean {s.mean:.4f}, 95% interval {low:.4f} to {high:.4f}")
            line = {"x1": x(low), "x2": x(high), "y1": middle, "y2": middle}
            shapes.append(tag("line", name, class_="interval", **line))
        position = {"x": x(s.mean) - 2, "y": middle - 8, "width": 4, "height": 16}
        shapes.append(tag("rect", tag("title", f"mean {s.mean:.4f}"), class_="mean", **position))
    box = f"0 0 {2 * WIDTH} {height}"
    return tag("figure", tag("svg", *shapes, viewBox=box, role="img"), class_="wide")


def draw_marks(
    marks: Sequence[Mark], *, x_label: str, y_label: str, fronts: Sequence[Sequence[Point]] = ()
) -> Html:
    """Draw points with their intervals, and staircases through the best of them."""
    ends = [v for m in marks for v in (m.y, *(m.interval or ()))]
    low, high = pad_range(min(ends), max(ends))
    x, y = make_scales(0, 1.08 * max(m.x for m in marks) or 1, low, high)
    shapes = []
    for front in fronts:
        path = step_path(x, y, [p[0] for p in front], [p[1] for p in front])
        shapes.append(tag("polyline", class_="front", points=" ".join(path)))
    for m in marks:
        if m.interval is not None:
            low, high = map(y, m.interval)
            line = {"x1": x(m.x), "x2": x(m.x), "y1": low, "y2": high}
            shapes.append(tag("line", stroke=m.color, stroke_width=2, opacity=0.5, **line))
        name = tag("title", f"{m.name}\n{y_label}: {m.y:.4f}\n{x_label}: {format_value(m.x)}")
        shapes.append(tag("circle", name, cx=x(m.x), cy=y(m.y), r=5.5, fill=m.color))
    return tag("figure", make_chart(x, y, x_label, y_label, shapes))


def make_chart(
    x: Scale,
    y: Scale,
    x_label: str,
    y_label: str,
    shapes: Sequence[Html],
    *,
    ticks_of_x: bool = True,
) -> Html:
    """Return shapes within axes."""
    width, height = x.stop + RIGHT, y.start + BOTTOM
    parts = draw_x_axis(x, x_label, height, with_ticks=ticks_of_x)
    ticks = list_ticks(y.low, y.high, 4)
    left = min(0, 27 - 7 * max(len(format_value(value)) for value in ticks))  # room for long ones
    for value in ticks:
        parts.append(tag("line", class_="grid", x1=x.start, x2=x.stop, y1=y(value), y2=y(value)))
        parts.append(tag("text", format_value(value), class_="name", x=LEFT - 7, y=y(value) + 4))
    parts.append(tag("line", class_="axis", x1=x.start, x2=x.stop, y1=y.start, y2=y.start))
    middle = (y.start + y.stop) / 2
    turn = f"rotate(-90 {left + 11} {middle})"
    title = tag("text", y_label, class_="axis-label", x=left + 11, y=middle, transform=turn)
    box = f"{left} 0 {width - left} {height}"
    return tag("svg", *parts, title, *shapes, viewBox=box, role="img")


def draw_x_axis(x: Scale, label: str, height: float, *, with_ticks: bool = True) -> list[Html]:
    """Return the ticks of an axis below a chart, and what it shows."""
    parts = []
    for value in list_ticks(x.low, x.high) if with_ticks else ():
        place = {"x1": x(value), "x2": x(value), "y1": TOP, "y2": height - BOTTOM}
        parts.append(tag("line", class_="grid", **place))
        position = {"x": x(value), "y": height - BOTTOM + 16}
        parts.append(tag("text", format_value(value), class_="tick", **position))
    place = {"x": (x.start + x.stop) / 2, "y": height - (6 if with_ticks else 20)}
    return [*parts, tag("text", label, class_="axis-label", **place)]


def make_scales(
    x_low: float, x_high: float, y_low: float, y_high: float, *, width: int = WIDTH,
    height: int = HEIGHT,
) -> tuple[Scale, Scale]:  # fmt: skip
    """Return the scales of a chart of this size."""
    x = Scale(x_low, x_high, LEFT, width - RIGHT)
    return x, Scale(y_low, y_high, height - BOTTOM, TOP)


def pad_range(low: float, high: float) -> tuple[float, float]:
    """Return a range with space above, and below unless it begins at 0.

    >>> pad_range(0.0, 2.0), pad_range(0.5, 0.5)
    ((0.0, 2.1), (0.45, 0.55))
    """
    space = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    return round(low - space if low else 0.0, 12), round(high + space, 12)


def round_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the tenths around scores from 0 to 1.

    >>> round_range([0.74, 0.88]), round_range([0.9])
    ((0.7, 0.9), (0.9, 1.0))
    """
    low = math.floor(10 * min(values) + 1e-9) / 10
    return min(low, 0.9), max(math.ceil(10 * max(values) - 1e-9) / 10, min(low, 0.9) + 0.1)


def make_legend(series: Sequence[Series | Mark]) -> Html:
    """Return names with their colors."""
    return tag("figcaption", *(make_chip(s.name, s.color) for s in series), class_="legend")


def make_chip(name: str, color: str) -> Html:
    """Return a name with a square of its color."""
    square = tag("rect", width=11, height=11, rx=2, fill=color)
    return tag("span", tag("svg", square, width=11, height=11), " ", name, class_="chip")


def shorten(name: str, length: int = 28) -> str:
    """Return a name that fits beside a chart."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def draw_bar(share: float, color: str) -> Html:
    """Return a bar for a cell of a table, of a share from 0 to 1."""
    width = round(60 * min(max(share, 0), 1), 1)
    bars = join(
        [
            tag("rect", class_="rail", width=60, height=6, rx=3),
            tag("rect", width=width, height=6, rx=3, fill=color),
        ]
    )
    return tag("svg", bars, class_="bar", width=60, height=6)
