"""An evaluation as a table of cases (CSV), a short table for the screen, and a box plot."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unet3d.atomic_write import atomic_write

Cases = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Scores of each class of each case."""

SHOWN = {"dice": "Dice", "iou": "IoU", "hd95_mm": "HD95 mm", "surface_dice": "surface Dice"}


def write_csv(cases: Cases, path: Path) -> None:
    """One row per case and class; what is not a number is left empty."""
    with atomic_write(path) as draft, draft.open("w", newline="") as file:
        writer = csv.writer(file)
        for row, (case, class_name, scores) in enumerate(
            (case, name, scores) for case, found in cases.items() for name, scores in found.items()
        ):
            if row == 0:
                writer.writerow(["case", "class", *scores])
            cells = ["" if math.isnan(v) else v for v in scores.values()]
            writer.writerow([case, class_name, *cells])


def make_score_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row per class and one for the mean over them: means with their intervals, and cases."""
    per_class = result["per_class"]
    found = [("", f"{SHOWN['dice']} [95 %]", *list(SHOWN.values())[1:], "cases", "in one only")]
    for name, means in per_class.items():
        numbers = (means["dice"]["cases"], means["absent_from_one"])
        found.append((name, *_cells(means), *map(str, numbers)))
    if len(per_class) > 1:
        found.append(("mean", *_cells(result["mean"]), "", ""))
    return found


def _cells(means: Mapping[str, Mapping[str, float]]) -> list[str]:
    cells = []
    for score in SHOWN:
        mean, low, high = (means[score][k] for k in ("mean", "low", "high"))
        digits = 2 if score == "hd95_mm" else 4
        cells.append("-" if math.isnan(mean) else f"{mean:.{digits}f}")
        if score == "dice" and not math.isnan(low):
            cells[-1] += f" [{low:.4f}, {high:.4f}]"
    return cells


def draw_boxes(cases: Cases, classes: Mapping[str, Sequence[int]], path: Path) -> None:
    """Dice and HD95 of each class: boxes with quartiles and median, and every case as a dot.

    `classes` has the labels of each, which decide about its color.
    """
    import numpy as np
    from matplotlib.figure import Figure

    from unet3d.report.slices import class_colors

    figure = Figure(figsize=(11, 1.6 + 0.45 * len(classes)), layout="constrained")
    colors = class_colors(classes)[1:]
    jitter = np.random.default_rng(0)
    for axes, score in zip(figure.subplots(1, 2, sharey=True), ("dice", "hd95_mm"), strict=True):
        for row, name in enumerate(classes):
            found = [case[name] for case in cases.values() if not math.isnan(case[name]["dice"])]
            both = [s for s in found if s["reference_ml"] and s["prediction_ml"]]
            drawn = found if score == "dice" else both  # a diagonal would press all others together
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
            axes.scatter(values, heights, s=9, color="black", alpha=0.45, linewidth=0, zorder=3)
            if len(drawn) < len(found):
                axes.text(
                    0.99,
                    row - 0.4,
                    f"and {len(found) - len(drawn)} in one only",
                    transform=axes.get_yaxis_transform(),
                    ha="right",
                    va="center",
                    fontsize=8,
                )
        axes.set_yticks(range(len(classes)), list(classes))
        axes.set_ylim(len(classes) - 0.5, -0.5)
        axes.set_xlabel(
            SHOWN["dice"] if score == "dice" else "HD95 in mm, where both have the class"
        )
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(f"{len(cases)} case{'s' * (len(cases) != 1)}")
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=110, format="png")
