"""`unet3d memory`: what a training step of the configured run costs, without running it."""

import json
import sys
from pathlib import Path

from unet3d.build.forecast import forecast, savings, step_title
from unet3d.build.measured import Measurement, measured
from unet3d.build.request import Request
from unet3d.build.study import study
from unet3d.commands.run import deliver
from unet3d.meter.pictures import layer_bars, study_bars, timeline
from unet3d.meter.predict import Prediction
from unet3d.meter.show import (
    as_json,
    layer_rows,
    layer_table,
    measured_table,
    peak_table,
    sentence,
    study_table,
)
from unet3d.types import Misuse

VIEWS = ("peak", "layers", "timeline")
FORMATS = ("table", "json", "png")


def main(request: Request, folder: Path) -> int:
    """Show one prediction."""
    cfg = request.config
    for key, known in (("view", VIEWS), ("format", FORMATS)):
        if cfg[key] not in known:
            raise Misuse(f"{key} must be one of {', '.join(known)}, got {cfg[key]!r}")
    if cfg.study is not None:
        return swept(request, cfg.study)
    if cfg.view == "timeline" and cfg.format != "png":
        raise Misuse("view=timeline is a picture: give format=png and output=FILE.png with it")
    if cfg.view == "peak" and cfg.format == "png":
        raise Misuse("a picture is of view=timeline or view=layers")
    prediction = forecast(request, cfg.volume)
    real = measured(request) if cfg.measure else None
    words = sentence(prediction, savings(request, prediction))
    if cfg.format == "json":
        found = as_json(prediction)
        if real is not None:
            found["measured_phases"] = {k: v.known() for k, v in real.phases.items()}
            found["measured_layers"] = layer_rows(real.layers)
        deliver(json.dumps(found), cfg.output)
    elif cfg.format == "png":
        picture(prediction, request, cfg.output)
    else:
        deliver(tables(prediction, real, cfg.view) + f"\n\n{words}", cfg.output)
        return 0
    print(words, file=sys.stderr)
    return 0


def tables(prediction: Prediction, real: Measurement | None, view: str) -> str:
    """The prediction, and below it what was measured, if it was."""
    if view == "peak":
        parts = [peak_table(prediction)]
        parts += [] if real is None else [measured_table(prediction, real.phases)]
    else:
        parts = [layer_table(prediction.layers)]
        parts += [] if real is None else ["measured on this GPU:", layer_table(real.layers)]
    return "\n\n".join(parts)


def swept(request: Request, what: str) -> int:
    """Show how the cost follows one thing of the config."""
    cfg = request.config
    points = []
    for point in study(request, what, measure=cfg.measure):
        if isinstance(point.found, str):
            print(f"{point.label}: {point.found}", file=sys.stderr)
        else:
            points.append((point.label, point.found, point.measured))
    if cfg.format == "png":
        path = picture_path(cfg.output)
        drawn = [(label, found) for label, found, _ in points]
        title = f"study={what}, model={request.choices.get('model')}"
        study_bars(drawn, title).savefig(path, dpi=110)
        print(cfg.output, file=sys.stderr)
    elif cfg.format == "json":
        rows = []
        for label, found, real in points:
            rows.append({"value": label, **as_json(found)})
            rows[-1] |= {} if real is None else {"measured": real.known()}
        deliver(json.dumps(rows), cfg.output)
    else:
        deliver(study_table(points), cfg.output)
    return 0


def picture_path(output: str | None) -> Path:
    """Where a picture goes: it cannot go to the screen."""
    if output is None:
        raise Misuse("a picture needs output=FILE.png")
    return Path(output)


def picture(prediction: Prediction, request: Request, output: str | None) -> None:
    """Draw the timeline or the layers into a file."""
    path = picture_path(output)
    draw = timeline if request.config.view == "timeline" else layer_bars
    draw(prediction, step_title(request)).savefig(path, dpi=110)
    print(output, file=sys.stderr)
