"""Write the model card of a bundle: what the network is, what it was trained on, how to use it."""

from collections.abc import Mapping, Sequence
from typing import Any

from unet3d.report.page import ENVIRONMENT
from unet3d.report.run_report import get_step_memory
from unet3d.text import MIB, pluralize


def make_model_card(
    pipeline: Mapping[str, Any],
    members: Sequence[Mapping[str, Any]],
    reports: Sequence[Mapping[str, Any] | None],
) -> str:
    """Return a model card in Markdown; `reports` are those of the members' runs, if they exist."""
    runs = [
        describe_run(report, f"Network {number}: " if len(reports) > 1 else "")
        for number, report in enumerate(reports)
        if report is not None
    ]
    spacing = pipeline["spacing_mm"]
    content = {
        **pipeline,
        "outputs": [name for name in pipeline["outputs"] if name != "background"],
        "resampled": f"resampled to {format_mm(spacing)}" if spacing else "at their own spacing",
        "members": map(describe_training, members),
        "runs": runs,
    }
    # The template escapes names, which may be those of a stranger's dataset, for Markdown.
    template = ENVIRONMENT.overlay(autoescape=False).get_template("model_card.md.jinja")
    return template.render(content) + "\n"


def describe_training(metadata: Mapping[str, Any]) -> str:
    """Say what a network is and which cases it was trained on."""
    config, statistics = metadata["config"], metadata.get("training_statistics")
    network = str(config["model"].get("_target_", "")).rpartition(".")[2]
    text = f"{network}, precision {config['precision']}, seed {config.get('seed')}"
    if config.get("fold") is not None:
        text += f", fold {config['fold']}"
    if statistics is not None:
        low, median, high = zip(*statistics["spacing_mm"], strict=True)
        sizes = f"{format_mm(low)} to {format_mm(high)}" if low != high else format_mm(median)
        text += f"; {pluralize(statistics['cases'], 'case')} with voxels of {sizes}"
    return text


def describe_run(report: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Return the scores of a run's validation cases, and what its steps took."""
    evaluation = report.get("evaluation") or {}
    per_class = evaluation.get("per_class")
    scores = {**per_class, "mean": evaluation.get("mean") or {}} if per_class else {}
    step = get_step_memory(report)
    peak = step.get("allocated", step.get("resident"))
    cost = "" if peak is None else f"; a training step took {peak / MIB:.0f} MiB"
    versions = ", ".join(f"{k} {v}" for k, v in report.get("versions", {}).items())
    return {
        "title": title,
        "scores": [(n, s.get("dice") or {}, s.get("hd95_mm") or {}) for n, s in scores.items()],
        "cost": f"{report.get('steps')} steps on {report.get('device')}{cost}; {versions}",
    }


def format_mm(sizes: Sequence[float]) -> str:
    """Return a voxel's size.

    >>> format_mm((1, 1, 1.25))
    '1 x 1 x 1.25 mm'
    """
    return f"{' x '.join(f'{size:.3g}' for size in sizes)} mm"
