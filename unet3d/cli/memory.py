"""`unet3d memory`: what a training step of the configured run costs, without running it."""

import json
import sys
from pathlib import Path

from unet3d.cli.app import write_output
from unet3d.config.compose import ComposedConfig
from unet3d.errors import UsageError
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.plots import layer_bars, study_bars, timeline
from unet3d.memory.tables import (
    estimate_to_dict,
    layer_rows,
    layer_table,
    measured_table,
    peak_table,
    study_table,
    summarize_estimate,
)
from unet3d.workflows.memory.estimate import estimate_memory, make_figure_title, rank_savings
from unet3d.workflows.memory.measure import Measurement, measure_step
from unet3d.workflows.memory.sweep import run_sweep

VIEWS = ("peak", "layers", "timeline")
FORMATS = ("table", "json", "png")


def main(request: ComposedConfig, folder: Path) -> int:
    """Show one prediction."""
    cfg = request.config
    for key, known in (("view", VIEWS), ("format", FORMATS)):
        if cfg[key] not in known:
            raise UsageError(f"{key} must be one of {', '.join(known)}, got {cfg[key]!r}")
    if cfg.sweep is not None:
        return print_sweep(request, cfg.sweep)
    if cfg.view == "timeline" and cfg.format != "png":
        raise UsageError("view=timeline is a picture: give format=png and output=FILE.png with it")
    if cfg.view == "peak" and cfg.format == "png":
        raise UsageError("a picture is of view=timeline or view=layers")
    prediction = estimate_memory(request, cfg.volume)
    real = measure_step(request) if cfg.measure else None
    words = summarize_estimate(prediction, rank_savings(request, prediction))
    if cfg.format == "json":
        found = estimate_to_dict(prediction)
        if real is not None:
            found["measured_phases"] = {k: v.known() for k, v in real.phases.items()}
            found["measured_layers"] = layer_rows(real.layers)
        write_output(json.dumps(found), cfg.output)
    elif cfg.format == "png":
        save_figure(prediction, request, cfg.output)
    else:
        write_output(tables(prediction, real, cfg.view) + f"\n\n{words}", cfg.output)
        return 0
    print(words, file=sys.stderr)
    return 0


def tables(prediction: MemoryEstimate, real: Measurement | None, view: str) -> str:
    """The prediction, and below it what was measured, if it was."""
    if view == "peak":
        parts = [peak_table(prediction)]
        parts += [] if real is None else [measured_table(prediction, real.phases)]
    else:
        parts = [layer_table(prediction.layers)]
        parts += [] if real is None else ["measured on this GPU:", layer_table(real.layers)]
    return "\n\n".join(parts)


def print_sweep(request: ComposedConfig, what: str) -> int:
    """Show how the cost follows one thing of the config."""
    cfg = request.config
    points = []
    for point in run_sweep(request, what, measure=cfg.measure):
        if isinstance(point.found, str):
            print(f"{point.label}: {point.found}", file=sys.stderr)
        else:
            points.append((point.label, point.found, point.measured))
    if cfg.format == "png":
        path = figure_path(cfg.output)
        drawn = [(label, found) for label, found, _ in points]
        title = f"sweep={what}, model={request.choices.get('model')}"
        study_bars(drawn, title).savefig(path, dpi=110)
        print(cfg.output, file=sys.stderr)
    elif cfg.format == "json":
        rows = []
        for label, found, real in points:
            rows.append({"value": label, **estimate_to_dict(found)})
            rows[-1] |= {} if real is None else {"measured": real.known()}
        write_output(json.dumps(rows), cfg.output)
    else:
        write_output(study_table(points), cfg.output)
    return 0


def figure_path(output: str | None) -> Path:
    """Where a picture goes: it cannot go to the screen."""
    if output is None:
        raise UsageError("a picture needs output=FILE.png")
    return Path(output)


def save_figure(prediction: MemoryEstimate, request: ComposedConfig, output: str | None) -> None:
    """Draw the timeline or the layers into a file."""
    path = figure_path(output)
    draw = timeline if request.config.view == "timeline" else layer_bars
    draw(prediction, make_figure_title(request)).savefig(path, dpi=110)
    print(output, file=sys.stderr)
