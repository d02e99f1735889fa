"""report.json and the short table at the end of a run."""

import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any

from unet3d import __version__
from unet3d.atomic_write import atomic_write
from unet3d.units import MIB

PACKAGES = ("torch", "lightning", "monai", "hydra-core", "nibabel", "numpy")


def collect_versions() -> dict[str, str]:
    """Of what decides a result."""
    return {"unet3d": __version__, "python": platform.python_version()} | {
        name: version(name) for name in PACKAGES
    }


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Write a report; what is not a number becomes null, as JSON wants it."""
    with atomic_write(path) as draft:
        draft.write_text(json.dumps(replace_nan(report), indent=2, allow_nan=False) + "\n")


def replace_nan(value: Any) -> Any:
    """The same with NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(k): replace_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def select_headline_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """What runs are compared by, as far as a run has it: `dice` and `hd95_mm` of its best
    checkpoint, else of its last validation; `peak_mib` and `step_seconds` of its steps.
    """
    evaluation, metrics = report.get("evaluation") or {}, report.get("metrics", {})
    found: dict[str, float | None] = {}
    for score in ("dice", "hd95_mm"):
        mean = (evaluation.get("mean") or {}).get(score)
        found[score] = mean["mean"] if mean else metrics.get(f"val/{score}")
    memory = report.get("memory", {})
    step = memory.get("steady_step") or memory.get("first_step") or {}
    peak = step.get("allocated", step.get("resident"))
    found["peak_mib"] = None if peak is None else peak / MIB
    found["step_seconds"] = report.get("speed", {}).get("median_step_seconds")
    return {k: v for k, v in found.items() if v is not None and math.isfinite(v)}


def predicted_row(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Predicted beside measured; on a CPU only tensors can be predicted, so no error is claimed."""
    predicted = memory.get("predicted", {}).get("allocated")
    if predicted is None:
        return []
    measured = memory.get("steady_step", memory.get("first_step", {})).get("allocated")
    if measured is None:
        return [("predicted", f"{predicted / MIB:.0f} MiB of tensors")]
    off = f"{100 * (predicted / measured - 1):+.1f} %"
    return [("predicted", f"{predicted / MIB:.0f} MiB allocated, {off} of what was measured")]


def validated_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The last validation's Dice."""
    return [
        (
            "Dice, mean" if name == "val/dice" else f"Dice, {name.removeprefix('val/dice/')}",
            "no such voxels" if math.isnan(value) else f"{value:.4f}",
        )
        for name, value in metrics.items()
        if name.startswith("val/dice")
    ]


def evaluated_rows(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the best checkpoint reached, on the files' own grids."""
    if not evaluation["per_class"]:
        return [("Dice", "no validation case could be evaluated")]
    rows = []
    for name, scores in {"mean": evaluation["mean"], **evaluation["per_class"]}.items():
        dice, hd95, surface = (scores[s]["mean"] for s in ("dice", "hd95_mm", "surface_dice"))
        said = f"{dice:.4f}, HD95 {hd95:.2f} mm, surface Dice {surface:.4f}"
        rows.append((f"Dice, {name}", "no such voxels" if math.isnan(dice) else said))
    if evaluation["largest_component"]:
        rows.append(("largest piece alone", ", ".join(evaluation["largest_component"])))
    return rows


def tensorboard_command(folder: str) -> str:
    """Return what shows a run in TensorBoard by its folder's name, to be pasted into a shell.

    TensorBoard names runs by their place below --logdir, so that of the run itself would show no
    name; --logdir_spec takes one, but no commas in a path and no colon in a name.

    >>> tensorboard_command("/data/my runs/first")
    "tensorboard --logdir_spec 'first:/data/my runs/first'"
    >>> tensorboard_command("/data/pools/pool=max,fold=0")
    'tensorboard --logdir /data/pools'
    """
    path = Path(folder)
    if "," in folder or ":" in path.name:
        return f"tensorboard --logdir {quote(str(path.parent))}"
    return f"tensorboard --logdir_spec {quote(f'{path.name}:{path}')}"


def format_report_table(report: Mapping[str, Any]) -> str:
    """What a person wants to know when a run is over."""
    rows: list[tuple[str, str]] = []
    if report.get("evaluation"):
        rows += evaluated_rows(report["evaluation"])
    else:
        rows += validated_rows(report["metrics"])
    speed = report["speed"]
    if speed:
        rows.append(
            (
                "seconds per step",
                f"{speed['median_step_seconds']:.3f} (95 % below {speed['p95_step_seconds']:.3f})",
            )
        )
        share = speed["median_data_wait_share"]
        rows.append(("waiting for data", f"{100 * share:.1f} % of a step"))
    for name, label in (("steady_step", "peak memory of a step"), ("validation", "of validation")):
        figures = report["memory"].get(name)
        if name == "steady_step" and figures is None:
            figures = report["memory"].get("first_step")
        if figures:
            shown = [f"{v / MIB:.0f} MiB {k}" for k, v in figures.items() if k != "phases"]
            rows.append((label, ", ".join(shown)))
    rows += predicted_row(report["memory"])
    rows.append(("parameters", f"{report['parameters']:,}"))
    rows.append(("run", report["folder"]))
    rows.append(("curves", tensorboard_command(report["folder"])))
    rows += [("warning", sentence) for sentence in report.get("warnings", [])]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:{width}}  {value}" for label, value in rows)
