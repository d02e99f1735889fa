"""Score all cases of an evaluation, and write what was found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet3d.workflows.evaluation.results import build_result, draw_worst_cases, write_result
from unet3d.workflows.evaluation.score_cases import CaseScores, Evaluation


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The scores of predictions.

    Attributes:
        mean: by score (``dice``, ``iou``, ``hd95_mm``, ``surface_dice``, ...), the ``mean`` over
            the classes, and ``low`` and ``high``, its 95% confidence interval.
        per_class: the same by class and score.
        cases: by case, class and score, one number.
        errors: why a case could not be scored, by case.
        content: all of this as evaluation.json has it, with definitions and versions.
        files: what was written.
    """

    mean: Mapping[str, Mapping[str, float]]
    per_class: Mapping[str, Mapping[str, Any]]
    cases: Mapping[str, Mapping[str, Mapping[str, float]]]
    errors: Mapping[str, str]
    content: Mapping[str, Any]
    files: tuple[Path, ...]


def run_evaluation(
    evaluation: Evaluation,
    *,
    on_case: Callable[[CaseScores], None] = lambda case: None,
    warn: Callable[[str], None] = lambda line: None,
) -> EvaluationResult:
    """Score every case, write the files if there is a folder for them, and draw the worst cases."""
    folder = evaluation.output
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    scored = []
    for case in evaluation.score_all():
        scored.append(case)
        on_case(case)
    result = build_result(evaluation, scored)
    files = []
    if folder is not None:
        files = write_result(result, folder)
        for line in draw_worst_cases(evaluation, result, folder):
            warn(line)
        files += [folder / "worst"] if result["worst"] else []
        if evaluation.command is not None:
            # What the page needs is imported now, so that the command starts sooner.
            from unet3d.workflows.evaluation.page import try_write_evaluation_page

            files += try_write_evaluation_page(folder, evaluation.command, warn)
    return EvaluationResult(
        mean=result["mean"],
        per_class=result["per_class"],
        cases=result["cases"],
        errors=result["errors"],
        content=result,
        files=tuple(files),
    )
