"""Draw line charts for pages as SVG: values appear under the pointer, without a script."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 10, 38
MAX_STRIPS = 80  # parts of a chart that show their values under the pointer
ACCENT = "var(--accent)"  # of a page, visible on light and dark

Points = Sequence[Sequence[float]]
"""(step, value) pairs."""


class Line(NamedTuple):
    """Points in the order of their steps, with a name and a CSS color."""

    name: str
    points: Points
    color: str


def list_ticks(low: float, high: float) -> Iterator[float]:
    """Yield round values from `low` to `high`, about five."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    size = power * next(n for n in (1, 2, 5, 10) if n * power >= rough)
    for n in range(math.ceil(low / size), math.floor(high / size * (1 + 1e-9)) + 1):
        yield n * size


def draw_chart(lines: Sequence[Line], unit: str, *, best: float | None = None) -> str:
    """Return lines over steps, with a legend of several; a dashed line marks the best step."""
    steps = [step for line in lines for step, _ in line.points]
    values = [value for line in lines for _, value in line.points]
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or abs(high) or 1.0
    bounds = max(0.0, low - margin) if low >= 0 else low - margin, high + margin
    x = partial(np.interp, xp=(0, max(steps)), fp=(LEFT, WIDTH - RIGHT))
    y = partial(np.interp, xp=bounds, fp=(HEIGHT - BOTTOM, TOP))
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" class="chart" role="img">']
    for value in list_ticks(*bounds):
        parts.append(f'<path class="rule" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(draw_text(LEFT - 6, y(value) + 4, f"{value:.10g}", "end"))
    for value in list_ticks(0, max(steps)):
        parts.append(draw_text(x(value), HEIGHT - BOTTOM + 16, f"{value:,.10g}"))
    parts.append(draw_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, f"{unit} over steps"))
    if best is not None:
        parts.append(f'<path class="best" d="M{x(best):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
    for line in lines:
        places = [f"{x(step):.1f} {y(value):.1f}" for step, value in line.points]
        style = f"stroke:{line.color}"
        if len(places) < 12:
            dots = "".join(f"M{place}h0" for place in places)
            parts.append(f'<path class="dots" style="{style}" d="{dots}"/>')
        parts.append(f'<path class="line" style="{style}" d="M{"L".join(places)}"/>')
    parts += [*draw_strips(lines, x, best), "</svg>"]
    if len(lines) > 1:
        parts += ['<div class="legend">', *map(draw_chip, lines), "</div>"]
    return "".join(parts)


def draw_strips(
    lines: Sequence[Line], x: Callable[[float], float], best: float | None
) -> Iterator[str]:
    """Yield an invisible strip around each step, or around some of many, that names its values."""
    steps = sorted({step for line in lines for step, _ in line.points})
    steps = steps[:: math.ceil(len(steps) / MAX_STRIPS)]
    edges = [LEFT, *((x(a) + x(b)) / 2 for a, b in pairwise(steps)), WIDTH - RIGHT]
    for step, start, stop in zip(steps, edges, edges[1:], strict=False):
        texts = [f"step {step:,.0f}" + (" (best)" if step == best else "")]
        for line in lines:
            at = min(bisect_left(line.points, step, key=itemgetter(0)), len(line.points) - 1)
            texts.append(f"{line.name} {line.points[at][1]:.4g}")
        yield (
            f'<rect class="strip" x="{start:.1f}" y="{TOP}" width="{max(0.0, stop - start):.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(chr(10).join(texts))}</title></rect>'
        )


def draw_chip(line: Line) -> str:
    """Return the entry of a legend."""
    return (
        f'<span class="chip"><i style="background:{line.color}"></i>{escape(line.name)} '
        f"<small>{line.points[-1][1]:.4g}</small></span>"
    )


def draw_text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    """Return a label."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
