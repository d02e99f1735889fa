"""Write an evaluation as a CSV file, a table, box plots, and the content of its page."""

import csv
import math
from collections.abc import Mapping, Sequence
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

MAX_VALUES = 8000  # scores in the table of cases: the page must stay below 5 MB
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
    added = [k for k in result["mean"] if k not in SCORE_LABELS and not k.endswith("_ml")]
    labels = SCORE_LABELS | {name: name for name in added}

    def format_means(means: Mapping[str, Mapping[str, float]]) -> list[str]:
        cells = [format_score(means[s]["mean"], 2 if s == "hd95_mm" else 4) for s in labels]
        if not math.isnan(means["dice"]["low"]):
            cells[0] += f" [{means['dice']['low']:.4f}, {means['dice']['high']:.4f}]"
        return cells

    rows = [("", "Dice [95 %]", *list(labels.values())[1:], "cases", "absent from one")]
    for name, means in result["per_class"].items():
        counts = means["dice"]["cases"], means["absent_from_one"]
        rows.append((name, *format_means(means), *map(str, counts)))
    if len(result["per_class"]) > 1:
        rows.append(("mean", *format_means(result["mean"]), "", ""))
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


def format_score(value: float | None, digits: int = 4) -> str:
    """Return a score, or a dash if there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def plot_scores(cases: Cases, classes: Mapping[str, Sequence[int]]) -> "Figure":
    """Draw box plots of Dice and HD95 per class (name -> labels), with every case as a dot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.6 + 0.45 * len(classes)), layout="constrained")
    colors = get_class_colors(classes)
    jitter = np.random.default_rng(0)
    box = {"orientation": "horizontal", "widths": 0.6, "showfliers": False, "patch_artist": True}
    box["medianprops"] = {"color": "black"}
    labels = {"dice": "Dice", "hd95_mm": "HD95 (mm), cases with the class in both"}
    for axes, (score, label) in zip(
        figure.subplots(1, 2, sharey=True), labels.items(), strict=True
    ):
        for row, name in enumerate(classes):
            scored = [case[name] for case in cases.values() if not math.isnan(case[name]["dice"])]
            if score == "hd95_mm":
                # Where one is empty, it is the image diagonal, which would squeeze the others.
                scored = [s for s in scored if s["reference_ml"] and s["prediction_ml"]]
            if not scored:
                continue
            values = np.array([s[score] for s in scored])
            fill = {"facecolor": (colors[name], 0.6)}
            axes.boxplot(values, positions=[row], boxprops=fill, **box)
            heights = row + jitter.uniform(-0.2, 0.2, len(values))
            # In a page thousands of dots are a picture, which is gray on light and dark.
            dots = {"s": 9, "color": "#667085", "linewidth": 0, "rasterized": True}
            axes.scatter(values, heights, alpha=0.6, zorder=3, **dots)
        axes.set_yticks(range(len(classes)), [escape_mathtext(name) for name in classes])
        axes.set_ylim(len(classes) - 0.5, -0.5)
        axes.set_xlabel(label)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(pluralize(len(cases), "case"))
    return figure


def describe_evaluation(
    result: Mapping[str, Any], *, command: str, machine: Mapping[str, str]
) -> dict[str, Any]:
    """Return the content of evaluation.html; `result` is that of evaluation.json."""
    means = {score: values["mean"] for score, values in result["mean"].items()}
    cases = pluralize(len(result["cases"]), "case")
    return {
        "result": result,
        "title": Path(str(result["predictions"])).name or "predictions",
        "subtitle": f"{cases} of {result['predictions']}, references {result['references']}",
        "headline": [
            *make_score_cards(means, result["mean"], [describe_roles(result["roles"]), ""]),
            ("Surface Dice", format_score(means.get("surface_dice")), "within the tolerance"),
            ("Classes", str(len(result["classes"])), f"in {cases}"),
        ],
        "errors": [f"{name}: {reason}" for name, reason in result["errors"].items()],
        "scores": make_scores(result),
        "command": command,
        "machine": machine,
    }


def make_score_cards(
    values: Mapping[str, float], mean: Mapping[str, Any], notes: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Return label, value and remark of Dice and HD95: a note, and the interval of the mean."""
    cards = []
    digits = {"dice": ("Dice", 4), "hd95_mm": ("HD95 (mm)", 2)}
    for (score, (label, places)), note in zip(digits.items(), notes, strict=True):
        low, high = (mean.get(score, {}).get(key, math.nan) for key in ("low", "high"))
        interval = f"95%: {format_score(low, places)} to {format_score(high, places)}"
        remarks = filter(None, [note, "" if math.isnan(low) else interval])
        cards.append((label, format_score(values.get(score), places), "; ".join(remarks)))
    return cards


def make_scores(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of scores.html; None if no case could be scored."""
    if not result["per_class"]:
        return None
    colors = get_class_colors(result["classes"])
    rows: list[dict[str, Any]] = []
    for name, scores in result["cases"].items():
        dice = [scores[c]["dice"] for c in colors]
        known = [value for value in dice if not math.isnan(value)]
        mean = sum(known) / len(known) if known else math.nan  # over the classes that it has
        bars = list(zip(dice, colors.values(), strict=True))
        rows.append({"name": name, "mean": mean, "dice": bars})
    rows.sort(key=lambda row: (math.isnan(row["mean"]), row["mean"]))
    shown = max(1, MAX_VALUES // len(colors))
    groups = len(set((result.get("groups") or {}).values()))
    resampled = f", resampled over {pluralize(groups, 'group')} of cases" if groups else ""
    names = join_first([entry["case"] for entry in result["worst"]])
    return {
        "figure": to_svg(plot_scores(result["cases"], result["classes"])),
        "note": "A dot is a case, a box the middle half of them. In brackets: the 95% bootstrap "
        f"interval of the mean over cases{resampled}.",
        "by_class": make_score_rows(result),
        "worst": f"{names}: see the folder worst/." if names else "No worst cases were requested.",
        "colors": colors,
        "cases": rows[:shown],
        "left_out": max(0, len(rows) - shown),
    }
