"""Find runs to compare, with the settings and the data in which they differ."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import join
from typing import Any

import numpy as np

from unet3d.errors import summarize_error
from unet3d.files import read_json, write_text
from unet3d.metric.bootstrap import compute_bootstrap_means
from unet3d.report.comparison import (
    DATA_KEYS,
    RunSummary,
    collect_keys,
    group_by_data,
    render_comparison,
)
from unet3d.text import flatten_keys

HIDDEN_KEYS = (
    *("resume", "init_from", "data.root", "data.cache", "debug", "save_every_seconds"),
    *("trainer.enable_progress_bar", "data.num_workers", "logger"),
)
"""Keys that do not affect a run's result."""


def find_runs(paths: Sequence[Path]) -> tuple[list[RunSummary], list[str]]:
    """Return the runs in these folders, and a message per unreadable report.

    Runs of the same data follow each other, best Dice first, with their difference from that one.
    """
    reports: dict[Path, Mapping[str, Any]] = {}
    problems = []
    for path in paths:
        files = [path / "report.json"]
        if not files[0].is_file():
            files = sorted(path.rglob("report.json"))
        if not files:
            problems.append(
                f"{path}: no report.json in this folder or below: give run folders, or folders "
                "that contain them; has the run ended?"
            )
        for file in files:
            try:
                report = read_json(file)
                if "config" not in report:
                    raise ValueError("not the report of a run")
                reports[file.parent] = report
            except (OSError, ValueError) as error:
                problems.append(f"{file}: {error}")
    differences = find_config_differences(list(reports.values()))
    runs = []
    for (folder, report), differs in zip(reports.items(), differences, strict=True):
        file = folder / "evaluation" / "evaluation.json"
        evaluation = read_json(file) if file.exists() else {"cases": {}}
        run = RunSummary(
            folder=folder,
            report=report,
            differs=differs,
            cases=evaluation["cases"],
            groups=evaluation.get("groups") or {},
            data=identify_data(report["config"], evaluation["cases"]),
        )
        runs.append(run)
    runs.sort(key=lambda run: -run.headline_metrics.get("dice", -1))
    compared = []
    for best, *others in group_by_data(runs):
        compared.append(best)
        for run in others:
            difference = compute_difference(run, best) if run.cases else None
            compared.append(replace(run, against_best=difference))
    return compared, problems


def find_config_differences(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return, for each run, its values of the options and keys in which the runs differ.

    Where the options of a group differ, the keys of that group are not compared.
    """
    choices: list[dict[str, Any]] = [dict(report.get("choices", {})) for report in reports]
    groups = sorted(find_differing_keys(choices))
    configs = [
        {
            key: value
            for key, value in flatten_keys(report["config"])
            if key not in HIDDEN_KEYS and key.split(".")[0] not in groups
        }
        for report in reports
    ]
    keys = [*groups, *find_differing_keys(configs)]

    def format_value(value: Any) -> str:
        return "null" if value is None else str(value).replace(" ", "")

    values = [chosen | config for chosen, config in zip(choices, configs, strict=True)]
    return [{key: format_value(value.get(key)) for key in keys} for value in values]


def find_differing_keys(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ, or that one of the mappings does not have."""
    keys = collect_keys(values)
    return [key for key in keys if len({json.dumps(value.get(key)) for value in values}) > 1]


def identify_data(config: Mapping[str, Any], cases: Mapping[str, Any]) -> str:
    """Return a text that is the same for the same cases with the same reference labels.

    Of runs without an evaluation it is the same for the same dataset and fold.
    """
    values: dict[str, Any] = {
        case: {name: s["reference_ml"] for name, s in scores.items()}
        for case, scores in cases.items()
    }
    if not cases:
        values = {key: v for key, v in flatten_keys(config) if key.startswith(DATA_KEYS)}
    return json.dumps(values, sort_keys=True)


def compute_difference(run: RunSummary, best: RunSummary) -> dict[str, float]:
    """Return the mean difference of Dice in the same cases, over classes, and its interval."""
    cells = [(case, name) for case, classes in best.cases.items() for name in classes]
    dice = [
        [scores[case][name]["dice"] for case, name in cells] for scores in (run.cases, best.cases)
    ]
    of_run, of_best = np.array(dice, float).reshape(2, len(best.cases), -1)  # None becomes NaN
    known = best.groups or run.groups
    groups = [known[case] for case in best.cases] if known else None
    return compute_bootstrap_means(of_run - of_best, groups)[1]


def try_write_comparison_page(
    runs: Sequence[RunSummary], path: Path, compared: Sequence[Path], problems: Sequence[str]
) -> str:
    """Write the page and return its path, or in one line what prevented that."""
    command = join(["unet3d", "compare", *map(str, compared)])
    try:
        files = [run.folder / "curves.json" for run in runs]
        curves = [read_json(file)["curves"] if file.exists() else {} for file in files]
        page = render_comparison(runs, curves=curves, problems=problems, command=command)
        write_text(path, page)
    except Exception as error:  # the comparison itself has been printed
        return f"{path} was not written: {summarize_error(error)}"
    return str(path)
