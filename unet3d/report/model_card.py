"""Write the model card of a bundle: what the network is, what it was trained on, how to use it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unet3d.text import escape_markdown, pluralize
from unet3d.units import MIB


def make_model_card(
    pipeline: Mapping[str, Any],
    members: Sequence[Mapping[str, Any]],
    reports: Sequence[Mapping[str, Any] | None],
) -> str:
    """Return a model card in Markdown; `reports` are those of the members' runs, if they exist."""
    outputs = [name for name in pipeline["outputs"] if name != "background"]
    title = f"Segmentation of {join_names(outputs)}"
    return (
        "\n\n".join(
            [
                f"# {title}",
                describe_inputs(pipeline),
                "## Use\n\n" + USAGE,
                "## Training\n\n" + "\n".join(describe_training(members)),
                "## Scores\n\n" + describe_scores(reports),
                "## Limits\n\n" + LIMITS,
            ]
        )
        + "\n"
    )


USAGE = """\
With unet3d (its distribution is `unet3d-lightning`; the `unet3d` on package indexes is another
project) and `pip install safetensors`: `unet3d.load("FOLDER").predict_file("scan.nii.gz",
"labels.nii.gz")`, or `unet3d predict checkpoint=FOLDER input=SCANS output=LABELS`.

With MONAI (`pip install 'monai[fire,ignite,nibabel]'`), for all scans of a folder, in this folder:

    python -m monai.bundle run --config_file configs/inference.json \\
      --dataset_dir SCANS --output_dir LABELS

With numpy, nibabel, and onnxruntime or torch, with one file per channel before the last:

    python scripts/predict.py scan.nii.gz labels.nii.gz

Files: `models/*.safetensors` are the weights; `models/*.onnx` and `models/*.pt2` are the networks
with their weights, for ONNX runtimes and for torch; `bundle.json` describes the inputs, the outputs
and the training."""

LIMITS = """\
Labels are only as good as the training data are like yours: scanners, protocols, anatomy and
pathology that were not in it may be segmented wrongly. This is not a medical device."""


def describe_inputs(pipeline: Mapping[str, Any]) -> str:
    """Say what goes in and what comes out."""
    spacing = pipeline["spacing_mm"]
    resampled = "at their own spacing" if spacing is None else f"resampled to {format_mm(spacing)}"
    lines = [
        f"Input: {join_names(pipeline['channels'])}, {resampled}, in windows of "
        f"{'x'.join(map(str, pipeline['patch_size']))} voxels.",
        f"Output: labels on the grid of the scan; {join_names(pipeline['classes'])} are "
        f"0 to {len(pipeline['classes']) - 1}.",
    ]
    if pipeline["regions"]:
        parts = [
            f"{escape_markdown(name)} {list(part)}" for name, part in pipeline["regions"].items()
        ]
        lines.append(f"Regions of labels: {', '.join(parts)}.")
    if pipeline["keep_largest_component"]:
        names = join_names(pipeline["keep_largest_component"])
        lines.append(f"Only the largest connected component is kept of: {names}.")
    return "\n".join(lines)


def join_names(names: Sequence[str]) -> str:
    """Join names of classes or channels, which may be those of a stranger's dataset."""
    return escape_markdown(", ".join(names))


def describe_training(members: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a list item for each network."""
    items = []
    for metadata in members:
        config, statistics = metadata["config"], metadata.get("training_statistics")
        network = str(config["model"].get("_target_", "")).rpartition(".")[2]
        item = f"{network}, precision {config['precision']}, seed {config.get('seed')}"
        if config.get("fold") is not None:
            item += f", fold {config['fold']}"
        if statistics is not None:
            low, median, high = zip(*statistics["spacing_mm"], strict=True)
            sizes = f"{format_mm(low)} to {format_mm(high)}" if low != high else format_mm(median)
            item += f"; {pluralize(statistics['cases'], 'case')} with voxels of {sizes}"
        items.append(f"- {escape_markdown(item)}")
    return items


def describe_scores(reports: Sequence[Mapping[str, Any] | None]) -> str:
    """Return tables of the validation scores, and the memory and versions of each run."""
    parts = []
    for number, report in enumerate(reports):
        if report is None:
            continue
        title = f"Network {number}: " if len(reports) > 1 else ""
        rows = list_score_rows(report.get("evaluation") or {})
        if rows:
            head = ["| class | Dice | 95% interval | HD95 mm |", "| --- | --- | --- | --- |"]
            parts.append(f"{title}validation cases of its fold:\n\n" + "\n".join(head + rows))
        memory = report.get("memory", {})
        step = memory.get("steady_step") or memory.get("first_step") or {}
        peak = step.get("allocated", step.get("resident"))
        versions = ", ".join(f"{k} {v}" for k, v in report.get("versions", {}).items())
        cost = "" if peak is None else f"; a training step took {peak / MIB:.0f} MiB"
        parts.append(
            f"{title}{report.get('steps')} steps on {report.get('device')}{cost}; {versions}."
        )
    return (
        "\n\n".join(parts) or "The report of the training run was not there when this was exported."
    )


def list_score_rows(evaluation: Mapping[str, Any]) -> list[str]:
    """Return the rows of a table of Dice and HD95."""
    scores = {**evaluation.get("per_class", {}), "mean": evaluation.get("mean")}
    rows = []
    for name, values in scores.items():
        dice, distance = ((values or {}).get(key) or {} for key in ("dice", "hd95_mm"))
        mean, low, high = (dice.get(key) for key in ("mean", "low", "high"))
        interval = f"{format_score(low)} to {format_score(high)}"
        hd95 = format_score(distance.get("mean"), 2)
        rows.append(f"| {escape_markdown(name)} | {format_score(mean)} | {interval} | {hd95} |")
    return rows if evaluation.get("per_class") else []


def format_score(value: float | None, digits: int = 4) -> str:
    """Return a score, or a dash for one that does not exist."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def format_mm(sizes: Sequence[float]) -> str:
    """Return a voxel's size.

    >>> format_mm((1, 1, 1.25))
    '1 x 1 x 1.25 mm'
    """
    return f"{' x '.join(f'{size:.3g}' for size in sizes)} mm"
