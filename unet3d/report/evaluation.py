"""Write an evaluation as a CSV file, a table, box plots, and the content of its page."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unet3d.files import atomic_write
from unet3d.report.figures import to_svg
from unet3d.report.slices import get_class_colors
from unet3d.text import escape_mathtext, join_first, pluralize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cases = Mapping[str, Mapping[str, Mapping[str, float]]]
"""case -> class -> score -> value."""

MAX_VALUES = 8000
"""Scores in the table of cases: the page must stay below 5 MB."""

MAX_CHART_CLASSES = 40

SCORE_LABELS = {"dice": "Dice", "iou": "IoU", "hd95_mm": "HD95 mm", "surface_dice": "surface Dice"}


def write_csv(cases: Cases, path: Path) -> None:
    """Write one row per case and class; NaN becomes an empty cell."""
    rows = [(case, *entry) for case, classes in cases.items() for entry in classes.items()]
    with atomic_write(path) as draft, draft.open("w", -1, "utf-8", "backslashreplace", "") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "class", *rows[0][2]])
        for case, name, scores in rows:
            cells = ["" if math.isnan(v) else v for v in scores.values()]
            writer.writerow([case, name, *cells])


def make_score_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a header, one row per class, and one for their mean if there are several."""
    per_class = result["per_class"]
    labels = SCORE_LABELS | {name: name for name in result["mean"] if is_additional(name)}
    rows = [("", "Dice [95 %]", *list(labels.values())[1:], "cases", "absent from one")]
    for name, means in per_class.items():
        counts = (means["dice"]["cases"], means["absent_from_one"])
        rows.append((name, *_format_scores(means, labels), *map(str, counts)))
    if len(per_class) > 1:
        rows.append(("mean", *_format_scores(result["mean"], labels), "", ""))
    return rows


def describe_roles(roles: Mapping[str, Sequence[str]] | None) -> str:
    """Say whether the cases were held out; nothing if that is not known.

    >>> describe_roles({"training": [], "validation": [], "held out": ["a", "b"]})
    'held out'
    >>> describe_roles({"training": ["c"], "validation": [], "held out": ["a", "b"]})
    '1 training, 2 held out'
    """
    counts = {role: len(names) for role, names in (roles or {}).items() if names}
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {role}" for role, count in counts.items())


def is_additional(score: str) -> bool:
    """Return whether a score is that of a metric that the config has added."""
    return score not in SCORE_LABELS and not score.endswith("_ml")


def _format_scores(means: Mapping[str, Mapping[str, float]], scores: Iterable[str]) -> list[str]:
    cells = []
    for score in scores:
        mean, low, high = (means[score][k] for k in ("mean", "low", "high"))
        cells.append(format_score(mean, 2 if score == "hd95_mm" else 4))
        if score == "dice" and not math.isnan(low):
            cells[-1] += f" [{low:.4f}, {high:.4f}]"
    return cells


def format_score(value: float | None, digits: int = 4) -> str:
    """Return a score, or a dash if there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def plot_scores(cases: Cases, classes: Mapping[str, Sequence[int]]) -> "Figure":
    """Draw box plots of Dice and HD95 per class, with every case as a dot.

    `classes` maps names to labels, which decide the colors.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.6 + 0.45 * len(classes)), layout="constrained")
    colors = get_class_colors(classes)
    jitter = np.random.default_rng(0)
    for axes, score in zip(figure.subplots(1, 2, sharey=True), ("dice", "hd95_mm"), strict=True):
        for row, name in enumerate(classes):
            scored = [case[name] for case in cases.values() if not math.isnan(case[name]["dice"])]
            both = [s for s in scored if s["reference_ml"] and s["prediction_ml"]]
            # Where one is empty, HD95 is the image diagonal, which would squeeze all other values.
            drawn = scored if score == "dice" else both
            values = np.array([s[score] for s in drawn])
            if not len(values):
                continue
            axes.boxplot(
                values,
                positions=[row],
                orientation="horizontal",
                widths=0.6,
                showfliers=False,
                patch_artist=True,
                boxprops={"facecolor": (colors[name], 0.6)},
                medianprops={"color": "black"},
            )
            heights = row + jitter.uniform(-0.2, 0.2, len(values))
            # In a page thousands of dots are a picture, which is gray on light and dark.
            dots = {"s": 9, "color": "#667085", "linewidth": 0, "rasterized": True}
            axes.scatter(values, heights, alpha=0.6, zorder=3, **dots)
            if len(drawn) < len(scored):
                axes.text(
                    0.99,
                    row - 0.4,
                    f"and {len(scored) - len(drawn)} absent from one",
                    transform=axes.get_yaxis_transform(),
                    ha="right",
                    va="center",
                    fontsize=8,
                )
        axes.set_yticks(range(len(classes)), [escape_mathtext(name) for name in classes])
        axes.set_ylim(len(classes) - 0.5, -0.5)
        axes.set_xlabel(
            SCORE_LABELS["dice"] if score == "dice" else "HD95 (mm), cases with the class in both"
        )
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(pluralize(len(cases), "case"))
    return figure


def describe_evaluation(
    result: Mapping[str, Any], *, command: str, machine: Mapping[str, str]
) -> dict[str, Any]:
    """Return the content of evaluation.html; `result` is that of evaluation.json."""
    return {
        "title": Path(str(result["predictions"])).name or "predictions",
        "subtitle": f"{pluralize(len(result['cases']), 'case')} of {result['predictions']}, "
        f"references {result['references']}",
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
    cases, colors = result["cases"], get_class_colors(result["classes"])
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
