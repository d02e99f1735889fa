"""The page of an evaluation: Dice per class and case with intervals, and the worst cases."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unet3d.report.evaluation import describe_roles, make_score_rows
from unet3d.report.html.charts import Spread, draw_bar, draw_spreads
from unet3d.report.html.elements import Html, fold, join, make_pairs, make_table, tag
from unet3d.report.html.page import Section, make_cards, make_empty, render_page
from unet3d.report.html.viewer import Viewer
from unet3d.report.slices import get_class_colors
from unet3d.text import join_first, pluralize

MAX_VALUES = 8000
"""Scores in the table of cases, and dots in the chart: the page must stay below 5 MB."""

MAX_CHART_CLASSES = 40


def get_hex_colors(classes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the color of each class, as in all figures."""
    colors = get_class_colors(classes)[1:]
    return {name: to_hex(rgb) for name, rgb in zip(classes, colors, strict=True)}


def to_hex(rgb: Sequence[float]) -> str:
    """Return a color of parts from 0 to 1 as in CSS.

    >>> to_hex((1, 0.5, 0))
    '#ff8000'
    """
    return "#" + "".join(f"{round(255 * float(part)):02x}" for part in rgb)


def render_evaluation(
    result: Mapping[str, Any],
    *,
    title: str,
    subtitle: str,
    command: str,
    machine: Mapping[str, str],
    viewer: Viewer | None,
) -> str:
    """Return the page of an evaluation; `result` is the content of evaluation.json."""
    sections = [
        *make_headline(result),
        *make_score_sections(result, viewer),
        make_origin_section(command, machine, result["versions"]),
    ]
    return render_page(
        kind="Evaluation", title=title, subtitle=subtitle, sections=sections, viewer=viewer
    )


def make_headline(result: Mapping[str, Any]) -> list[Section]:
    """Return the means in large letters, and what went wrong."""
    mean, cases = result["mean"], pluralize(len(result["cases"]), "case")
    remarks = [describe_roles(result["roles"]), format_interval(mean, "dice", 4)]
    cards = [
        ("Dice", format_mean(mean, "dice", 4), "; ".join(filter(None, remarks))),
        ("HD95 (mm)", format_mean(mean, "hd95_mm", 2), format_interval(mean, "hd95_mm", 2)),
        ("Surface Dice", format_mean(mean, "surface_dice", 4), "within the tolerance"),
        ("Classes", str(len(result["classes"])), f"in {cases}"),
    ]
    sections = [Section(title="Mean over classes and cases", content=[make_cards(cards)])]
    errors = [f"{name}: {reason}" for name, reason in list(result["errors"].items())[:50]]
    if errors:
        count = pluralize(len(result["errors"]), "case")
        sections.append(Section(title=f"{count} not scored", content=[make_warnings(errors)]))
    return sections


def make_score_sections(result: Mapping[str, Any], viewer: Viewer | None) -> list[Section]:
    """Return scores by class, the viewer of the worst cases, and scores by case."""
    if not result["per_class"]:
        return [Section(title="Scores", content=[make_empty("No case could be scored.")])]
    classes, cases = result["classes"], result["cases"]
    colors = get_hex_colors(classes)
    shown = list_dice(result)[:MAX_CHART_CLASSES]
    spreads = [
        Spread(
            name=name,
            color=colors[name],
            values=list_values(cases, name)[:: math.ceil(len(cases) * len(shown) / MAX_VALUES)],
            mean=dice["mean"],
            interval=(dice["low"], dice["high"]) if has_value(dice["low"]) else None,
        )
        for name, dice in shown
    ]
    groups = len(set((result.get("groups") or {}).values()))
    resampled = f" over {pluralize(groups, 'group')} of cases" if groups else ""
    note = (
        "A dot is a case, the bar the mean over cases, the line its 95% bootstrap interval"
        f"{resampled}."
    )
    by_class: list[object] = [make_table(make_score_rows(result))]
    if spreads:
        chart = draw_spreads(spreads, x_label="Dice")
        by_class = [chart, tag("p", note, class_="note"), *by_class]
    worst = result["worst"]
    names = join_first([entry["case"] for entry in worst])
    empty = "No worst cases were requested." if not worst else f"{names}: see the folder worst/."
    volumes: object = make_empty(empty) if viewer is None else viewer.markup
    return [
        Section(title="Dice per class", content=by_class),
        Section(title="Worst cases", content=[volumes], id_="cases"),
        Section(title="Cases, lowest Dice first", content=make_case_table(result, colors)),
    ]


def list_values(cases: Mapping[str, Any], name: str) -> list[tuple[str, float]]:
    """Return the cases that have a class, with its Dice."""
    dice = [(case, scores[name]["dice"]) for case, scores in cases.items()]
    return [(case, value) for case, value in dice if has_value(value)]


def list_dice(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float]]]:
    """Return the Dice of each class that any case has."""
    dice = [(name, scores["dice"]) for name, scores in result["per_class"].items()]
    return [(name, scores) for name, scores in dice if has_value(scores["mean"])]


def make_case_table(result: Mapping[str, Any], colors: Mapping[str, str]) -> list[object]:
    """Return a row per case with the Dice of each class."""
    classes = list(result["classes"])
    rows = []
    for name, scores in result["cases"].items():
        values = [scores[c]["dice"] for c in classes]
        known = [v for v in values if has_value(v)]
        rows.append((sum(known) / len(known) if known else math.nan, name, values))
    rows.sort(key=lambda row: (not has_value(row[0]), row[0]))
    table: list[tuple[object, ...]] = [("case", "mean", *classes)]
    shown = max(1, MAX_VALUES // max(1, len(classes)))
    for mean, name, values in rows[:shown]:
        bars = [make_bar(v, colors[c]) for c, v in zip(classes, values, strict=True)]
        table.append((name, tag("b", format_score(mean)), *bars))
    more = len(rows) - shown
    note = [tag("p", f"{more:,} more cases are in evaluation.csv.", class_="note")]
    return [make_table(table, class_="scroll tall"), *(note if more > 0 else [])]


def make_bar(value: float | None, color: str) -> Html:
    """Return a score as a number and a bar."""
    if not has_value(value):
        return tag("span", "-")
    return join([draw_bar(float(value or 0), color), f" {format_score(value)}"])


def make_warnings(lines: Sequence[str]) -> Html:
    """Return lines to notice."""
    return tag("ul", *(tag("li", line) for line in lines), class_="warnings")


def make_origin_section(
    command: str, machine: Mapping[str, str], versions: Mapping[str, str], *more: object
) -> Section:
    """Return where a result comes from: command, machine and versions."""
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    pairs = [*machine.items(), ("versions", packages)]
    return Section(
        title="How it was made",
        content=[tag("pre", command), fold("Machine and versions", make_pairs(pairs)), *more],
    )


def has_value(value: float | None) -> bool:
    """Return whether a score is a number; files have null for NaN."""
    return value is not None and math.isfinite(value)


def format_score(value: float | None, digits: int = 4) -> str:
    """Return a score, or a dash if there is none."""
    return f"{value:.{digits}f}" if value is not None and has_value(value) else "-"


def format_mean(mean: Mapping[str, Any], score: str, digits: int) -> str:
    """Return a mean over the classes."""
    return format_score(mean.get(score, {}).get("mean"), digits)


def format_interval(mean: Mapping[str, Any], score: str, digits: int) -> str:
    """Return the interval of a mean in words."""
    low, high = (mean.get(score, {}).get(key) for key in ("low", "high"))
    if not (has_value(low) and has_value(high)):
        return ""
    return f"95%: {format_score(low, digits)} to {format_score(high, digits)}"
