"""`unet3d evaluate`: score predictions against references, by case and class."""

import sys
from itertools import count
from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.data.layouts.splits import describe_groups, find_likely_groups
from unet3d.evaluation.evaluate import ScoredCase, run_evaluation
from unet3d.evaluation.options import build_evaluation, read_config
from unet3d.report.evaluation import describe_roles, make_score_rows
from unet3d.text import escape_unprintable, format_columns, join_first


def main(composed: ComposedConfig, folder: Path) -> int:
    """Score every case, print the results, and write the files."""
    evaluation = build_evaluation(read_config(composed))
    total, numbers = len(evaluation.pairs), count(1)

    def print_case(case: ScoredCase) -> None:
        outcome = f"Dice {case.dice:.4f}" if case.error is None else f"ERROR {case.error}"
        warn(f"{next(numbers)}/{total} {case.name}: {outcome}")

    def warn(line: str) -> None:
        print(escape_unprintable(line), file=sys.stderr)

    result = run_evaluation(evaluation, on_case=print_case, warn=warn)
    if names := evaluation.without_reference:
        warn(f"{len(names)} predictions without a reference: {join_first(names)}")
    if result.per_class:
        print(format_columns(make_score_rows(result.content)))
    if groups := result.content["groups"]:
        print(f"confidence intervals resample groups: {describe_groups(list(groups), groups)}")
    elif likely := find_likely_groups([pair.name for pair in evaluation.pairs]):
        option = likely.option.removeprefix("data.")
        warn(f"{likely.message}: add {option} to resample patients for confidence intervals")
    if roles := describe_roles(result.content["roles"]):
        print(f"cases, by their names in the run: {roles}")
    if errors := list(result.errors):
        print(f"{len(errors)} of {total} cases have errors: {join_first(errors)}")
    if result.files:
        print(*result.files, sep=", ")
    return 1 if errors else 0
