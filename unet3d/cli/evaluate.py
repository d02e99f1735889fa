"""`unet3d evaluate`: how well predictions agree with references, by case and class."""

import sys
from collections.abc import Sequence
from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.memory.tables import format_columns
from unet3d.report.evaluation import make_score_rows
from unet3d.workflows.evaluation.results import build_result, draw_worst_cases, write_result
from unet3d.workflows.evaluation.score_cases import build_evaluation


def main(request: ComposedConfig, folder: Path) -> int:
    """Compare every case, say how each went, and leave the files."""
    asked = build_evaluation(request)
    asked.output.mkdir(parents=True, exist_ok=True)
    judged = []
    for case in asked.score_all():
        judged.append(case)
        said = f"FAULT {case.fault}" if case.fault is not None else f"Dice {case.dice:.4f}"
        print(f"{len(judged)}/{len(asked.pairs)} {case.name}: {said}", file=sys.stderr)
    if alone := asked.without_reference:
        print(
            f"{len(alone)} predictions without a reference: {truncate_list(alone)}", file=sys.stderr
        )
    found = build_result(asked, judged)
    files = write_result(found, asked.output)
    for line in draw_worst_cases(asked, found):
        print(line, file=sys.stderr)
    if found["per_class"]:
        print(format_columns(make_score_rows(found)))
    if faults := found["faults"]:
        print(
            f"{len(faults)} of {len(judged)} cases could not be evaluated: {truncate_list(list(faults))}"
        )
    pictures = [asked.output / "worst"] if found["worst"] else []
    print(*files, *pictures, sep=", ")
    return 1 if faults else 0


def truncate_list(names: Sequence[str]) -> str:
    """The first names of many."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
