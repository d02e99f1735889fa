"""`unet3d evaluate`: score predictions against references, by case and class."""

import sys
from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.evaluation import parse_evaluation
from unet3d.report.evaluation import make_score_rows
from unet3d.text import format_columns, join_first
from unet3d.workflows.evaluation.results import build_result, draw_worst_cases, write_result
from unet3d.workflows.evaluation.score_cases import build_evaluation


def main(composed: ComposedConfig, folder: Path) -> int:
    """Score every case, print the results, and write the files."""
    evaluation = build_evaluation(parse_evaluation(composed))
    evaluation.output.mkdir(parents=True, exist_ok=True)
    scored = []
    for case in evaluation.score_all():
        scored.append(case)
        outcome = f"Dice {case.dice:.4f}" if case.error is None else f"ERROR {case.error}"
        print(f"{len(scored)}/{len(evaluation.pairs)} {case.name}: {outcome}", file=sys.stderr)
    if names := evaluation.without_reference:
        print(
            f"{len(names)} predictions without a reference: {join_first(names)}",
            file=sys.stderr,
        )
    result = build_result(evaluation, scored)
    files = write_result(result, evaluation.output)
    for line in draw_worst_cases(evaluation, result):
        print(line, file=sys.stderr)
    if result["per_class"]:
        print(format_columns(make_score_rows(result)))
    if errors := list(result["errors"]):
        print(f"{len(errors)} of {len(scored)} cases have errors: {join_first(errors)}")
    figures = [evaluation.output / "worst"] if result["worst"] else []
    print(*files, *figures, sep=", ")
    return 1 if errors else 0
