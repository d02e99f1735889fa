"""Find runs and compare their cases in pairs; write the page with the curves of the runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.errors import summarize_error
from unet3d.files import read_json, write_text
from unet3d.metric.bootstrap import compute_bootstrap_means
from unet3d.report.comparison_page import render_comparison
from unet3d.report.curves import Points
from unet3d.report.run_comparison import RunSummary, find_runs, group_by_data


def find_compared_runs(paths: Sequence[Path]) -> tuple[list[RunSummary], list[str]]:
    """Return the runs of `find_runs`, each with its difference from the best one of its data."""
    runs, problems = find_runs(paths)
    compared = []
    for best, *others in group_by_data(runs):
        compared.append(best)
        for run in others:
            difference = compute_difference(run, best) if run.cases else None
            compared.append(replace(run, against_best=difference))
    return compared, problems


def compute_difference(run: RunSummary, best: RunSummary) -> dict[str, float]:
    """Return the mean difference of Dice in the same cases, over classes, and its interval."""

    def get_dice(scores: Mapping[str, Any]) -> np.ndarray:
        dice = [
            [scores[case][name]["dice"] for name in classes] for case, classes in best.cases.items()
        ]
        return np.array(dice, float)  # None becomes NaN

    known = best.groups or run.groups
    groups = [known[case] for case in best.cases] if known else None
    return compute_bootstrap_means(get_dice(run.cases) - get_dice(best.cases), groups)[1]


def try_write_comparison_page(
    runs: Sequence[RunSummary], path: Path, *, problems: Sequence[str], command: str
) -> str:
    """Write the page and return its path, or in one line what prevented that."""
    try:
        curves = [read_curves(run.folder / "curves.json") for run in runs]
        page = render_comparison(runs, curves=curves, problems=problems, command=command)
        write_text(path, page)
    except Exception as error:  # the comparison itself has been printed
        return f"{path} was not written: {summarize_error(error)}"
    return str(path)


def read_curves(path: Path) -> Mapping[str, Points]:
    """Return the curves of a run; none if it has no such file."""
    return read_json(path)["curves"] if path.exists() else {}
