"""Render pages, which load nothing from elsewhere, and model cards from templates."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from unet3d.report.evaluation import format_score
from unet3d.report.run_report import get_peak_mib
from unet3d.text import escape_markdown, pluralize

MAX_BYTES = 5_000_000  # of a report, so that it can be sent by mail
PICTURES_SHARE = 0.25  # of a report, for pictures of its worst cases; the viewer gets the rest

ENVIRONMENT = Environment(
    loader=PackageLoader("unet3d.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {"score": format_score, "pluralize": pluralize, "md": escape_markdown}


def render_page(template: str, **content: Any) -> str:
    """Return a document; text in `content` is escaped, except for figures."""
    return ENVIRONMENT.get_template(template).render(content)


def embed_pictures(files: Iterable[Path]) -> dict[str, str]:
    """Return PNG files in base64 by name, the first ones that fit into a report."""
    pictures: dict[str, str] = {}
    size = 0
    for file in files:
        data = base64.b64encode(file.read_bytes()).decode("ascii")
        size += len(data)
        if size > PICTURES_SHARE * MAX_BYTES:
            break
        pictures[file.stem] = data
    return pictures


def make_model_card(
    pipeline: Mapping[str, Any],
    members: Sequence[Mapping[str, Any]],
    reports: Sequence[Mapping[str, Any] | None],
) -> str:
    """Return a bundle's model card in Markdown; `reports` are those of its runs, if they exist."""
    spacing = pipeline["spacing_mm"]
    content = {
        **pipeline,
        "outputs": [name for name in pipeline["outputs"] if name != "background"],
        "resampled": f"resampled to {format_mm(spacing)}" if spacing else "at their own spacing",
        "members": map(describe_training, members),
        "runs": [
            describe_scores(report, f"Network {number}: " if len(reports) > 1 else "")
            for number, report in enumerate(reports)
            if report is not None
        ],
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


def describe_scores(report: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Return the scores of a run's validation cases, and what its steps took."""
    evaluation = report.get("evaluation") or {}
    per_class = evaluation.get("per_class")
    scores = {**per_class, "mean": evaluation.get("mean") or {}} if per_class else {}
    peak = get_peak_mib(report)
    cost = "" if peak is None else f"; a training step took {peak:.0f} MiB"
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
