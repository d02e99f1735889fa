"""Write an evaluation as a CSV file, a table for the terminal and box plots."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d.files import atomic_write
from unet3d.text import escape_mathtext, format_cell, pluralize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cases = Mapping[str, Mapping[str, Mapping[str, float]]]
"""case -> class -> score -> value."""

SCORE_LABELS = {"dice": "Dice", "iou": "IoU", "hd95_mm": "HD95 mm", "surface_dice": "surface Dice"}


def write_csv(cases: Cases, path: Path) -> None:
    """Write one row per case and class; NaN becomes an empty cell."""
    with atomic_write(path) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        header_written = False
        for case, classes in cases.items():
            for name, scores in classes.items():
                if not header_written:
                    writer.writerow(["case", "class", *map(format_cell, scores)])
                    header_written = True
                cells = ["" if math.isnan(v) else v for v in scores.values()]
                writer.writerow([format_cell(case), format_cell(name), *cells])


def make_score_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a header, one row per class, and one for their mean if there are several."""
    per_class = result["per_class"]
    labels = SCORE_LABELS | {name: name for name in result["mean"] if is_additional(name)}
    rows = [
        (
            "",
            f"{SCORE_LABELS['dice']} [95 %]",
            *list(labels.values())[1:],
            "cases",
            "absent from one",
        )
    ]
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
    import numpy as np
    from matplotlib.figure import Figure

    from unet3d.report.slices import get_class_colors

    figure = Figure(figsize=(11, 1.6 + 0.45 * len(classes)), layout="constrained")
    colors = get_class_colors(classes)[1:]
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
                boxprops={"facecolor": (*colors[row], 0.6)},
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
