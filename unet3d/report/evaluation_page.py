"""The page of an evaluation: Dice per class and case with intervals, and the worst cases."""

import math
from collections.abc import Mapping
from typing import Any

from unet3d.report.evaluation import describe_roles, format_score, make_score_rows, plot_scores
from unet3d.report.figures import to_svg
from unet3d.report.slices import get_hex_colors
from unet3d.text import join_first, pluralize

MAX_VALUES = 8000
"""Scores in the table of cases: the page must stay below 5 MB."""

MAX_CHART_CLASSES = 40


def describe_evaluation(
    result: Mapping[str, Any],
    *,
    title: str,
    subtitle: str,
    command: str,
    machine: Mapping[str, str],
) -> dict[str, Any]:
    """Return the content of evaluation.html; `result` is that of evaluation.json."""
    return {
        "title": title,
        "subtitle": subtitle,
        "headline": make_headline(result),
        "errors": [f"{name}: {reason}" for name, reason in result["errors"].items()],
        "scores": make_scores(result),
        "command": command,
        "machine": machine,
        "versions": result["versions"],
    }


def make_headline(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the means, each with a label and a remark."""
    mean = result["mean"]
    values = {score: values["mean"] for score, values in mean.items()}
    remarks = [describe_roles(result["roles"]), format_interval(mean, "dice")]
    return [
        ("Dice", format_score(values.get("dice")), "; ".join(filter(None, remarks))),
        ("HD95 (mm)", format_score(values.get("hd95_mm"), 2), format_interval(mean, "hd95_mm")),
        ("Surface Dice", format_score(values.get("surface_dice")), "within the tolerance"),
        ("Classes", str(len(result["classes"])), f"in {pluralize(len(result['cases']), 'case')}"),
    ]


def make_scores(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of scores.html; None if no case could be scored."""
    if not result["per_class"]:
        return None
    cases, colors = result["cases"], get_hex_colors(result["classes"])
    groups = len(set((result.get("groups") or {}).values()))
    resampled = f", resampled over {pluralize(groups, 'group')} of cases" if groups else ""
    drawn = {name: result["classes"][name] for name in list(colors)[:MAX_CHART_CLASSES]}
    rows = [make_case_row(name, scores, colors) for name, scores in cases.items()]
    rows.sort(key=lambda row: (math.isnan(row["mean"]), row["mean"]))
    shown = max(1, MAX_VALUES // len(colors))
    names = join_first([entry["case"] for entry in result["worst"]])
    return {
        "figure": to_svg(plot_scores(cases, drawn)),
        "note": "A dot is a case, a box the middle half of them. In brackets: the 95% bootstrap "
        f"interval of the mean over cases{resampled}.",
        "by_class": make_score_rows(result),
        "worst": f"{names}: see the folder worst/." if names else "No worst cases were requested.",
        "colors": colors,
        "cases": rows[:shown],
        "more": f"{len(rows) - shown:,} more cases are in evaluation.csv."
        if len(rows) > shown
        else "",
    }


def make_case_row(
    name: str, scores: Mapping[str, Mapping[str, float]], colors: Mapping[str, str]
) -> dict[str, Any]:
    """Return the Dice of a case: its mean over the classes that it has, and of each class."""
    dice = [scores[c]["dice"] for c in colors]
    known = [value for value in dice if not math.isnan(value)]
    mean = sum(known) / len(known) if known else math.nan
    return {"name": name, "mean": mean, "dice": list(zip(dice, colors.values(), strict=True))}


def format_interval(mean: Mapping[str, Any], score: str) -> str:
    """Return the interval of a mean in words; nothing if it has none."""
    digits = 2 if score == "hd95_mm" else 4
    low, high = (mean.get(score, {}).get(key, math.nan) for key in ("low", "high"))
    if math.isnan(low):
        return ""
    return f"95%: {format_score(low, digits)} to {format_score(high, digits)}"
