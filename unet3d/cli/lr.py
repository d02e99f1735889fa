"""`unet3d lr`: find a learning rate."""

import json
from pathlib import Path

from unet3d.cli.output import write_figure, write_output
from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.lr import parse_lr
from unet3d.report.lr_curve import LRCurve
from unet3d.stop_signals import SignalListener
from unet3d.text import format_columns
from unet3d.workflows.training.find_lr import try_learning_rates
from unet3d.workflows.training.fit import fit_model
from unet3d.workflows.training.run import TrainingRun

ROWS = 10
"""Rows of the table."""


def main(composed: ComposedConfig, folder: Path) -> int:
    """Train with a rising rate, and print the loss and a suggestion."""
    settings = parse_lr(composed)
    output = settings.output

    def fit(run: TrainingRun) -> None:
        fit_model(run, None, signals)

    with SignalListener().listening() as signals:
        curve = try_learning_rates(settings, fit)
    if output.format == "json":
        write_output(json.dumps(curve.to_dict()), output.path)
    elif output.format == "png" and output.path is not None:
        choices = settings.training.composition.choices
        title = ", ".join(f"{group}={choices[group]}" for group in ("model", "optimizer", "loss"))
        write_figure(curve.plot(title), output.path, dpi=100)
    else:
        write_output(format_curve(curve, settings.steps), output.path)
    return 0


def format_curve(curve: LRCurve, planned: int) -> str:
    """Return a table of the loss, and the suggestion as an override."""
    steps = len(curve.losses)
    shown = sorted({*range(0, steps, max(1, steps // ROWS)), steps - 1})
    rows = [
        ("learning rate", "loss, moving average"),
        *((f"{curve.rates[n]:.1e}", f"{curve.smoothed[n]:.3f}") for n in shown),
    ]
    rate = curve.suggestion
    if rate is None:
        advice = "the loss never falls: try a smaller min_lr or more steps"
    else:
        advice = f"the loss falls fastest with optimizer.lr={rate:.1e}"
    end = f"; it diverges at {curve.rates[-1]:.1e}" if steps < planned else ""
    return f"{format_columns(rows)}\n\n{advice}{end}"
