"""`unet3d lr`: find a learning rate."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, cast

from unet3d.commands.train import build_training
from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import integer, number, read_settings
from unet3d.config.instantiate import Factory
from unet3d.errors import RunError, UsageError
from unet3d.files import write_figure, write_output
from unet3d.report.curves import LRCurve
from unet3d.signals import SignalListener
from unet3d.text import format_columns
from unet3d.training.callbacks.trials import LRRangeTest
from unet3d.training.config import TrainConfig, parse_train_config
from unet3d.training.run import explain_errors
from unet3d.training.start import prepare_start

MIN_STEPS = 20
"""Fewer steps show no slope."""


@dataclass(frozen=True, kw_only=True)
class LRConfig:
    """The range of learning rates to test."""

    training: TrainConfig
    min_lr: Annotated[float, number("above 0")]
    max_lr: Annotated[float, number("above 0")]
    steps: Annotated[int, integer(f">= {MIN_STEPS}")]
    format: Literal["table", "json", "png"]
    output: Path | None

    def __post_init__(self):
        if self.min_lr >= self.max_lr:
            raise UsageError(
                f"min_lr must be below max_lr, got {self.min_lr:g} and {self.max_lr:g}"
            )
        if self.format == "png" and self.output is None:
            raise UsageError("format=png needs output=FILE.png")


def main(composed: ComposedConfig, folder: Path) -> int:
    """Train with a rising rate, and print the loss and a suggestion."""
    settings = read_settings(LRConfig, composed.config, training=parse_train_config(composed))
    curve = try_learning_rates(settings)
    if settings.format == "json":
        write_output(json.dumps(curve.to_dict()), settings.output)
    elif settings.format == "png" and settings.output is not None:
        choices = settings.training.composition.choices
        title = ", ".join(f"{group}={choices[group]}" for group in ("model", "optimizer", "loss"))
        write_figure(curve.plot(title), settings.output, dpi=100)
    else:
        write_output(format_curve(curve, settings.steps), settings.output)
    return 0


def try_learning_rates(settings: LRConfig) -> LRCurve:
    """Train with a learning rate that rises: without validation, schedule and files."""
    test = LRRangeTest(min_lr=settings.min_lr, max_lr=settings.max_lr, steps=settings.steps)
    training = settings.training
    factory = training.trainer.factory.bind(limit_val_batches=0, num_sanity_val_steps=0)
    limits = {"max_steps": settings.steps, "max_epochs": None, "max_seconds": None}
    training = replace(
        training,
        callbacks={},
        loggers={},
        scheduler=Factory("scheduler", {"_target_": "unet3d.training.schedules.Constant"}),
        resume=None,
        step=replace(training.step, ema_decay=None),
        trainer=replace(training.trainer, factory=factory, **limits),
    )
    with TemporaryDirectory() as folder, SignalListener().listening() as signals:
        run = build_training(training, Path(folder), callbacks=[test])
        for message in prepare_start(run).messages:  # loads init_from=
            print(message, file=sys.stderr)
        cast(Any, run.trainer).callbacks.remove(run.callbacks.last)
        try:
            with explain_errors(run, None, signals):
                run.trainer.fit(run.module, run.data)
        except RunError:  # a loss or gradient that is not finite
            if len(test.curve.losses) < MIN_STEPS:
                raise
    return test.curve


def format_curve(curve: LRCurve, planned: int) -> str:
    """Return a table of the loss, and the suggestion as an override."""
    steps = len(curve.losses)
    shown = sorted({*range(0, steps, max(1, steps // 10)), steps - 1})
    rows = [
        ("learning rate", "loss, moving average"),
        *((f"{curve.rates[n]:.1e}", f"{curve.smoothed[n]:.3f}") for n in shown),
    ]
    advice = "the loss never falls: try a smaller min_lr or more steps"
    if curve.suggestion is not None:
        advice = f"the loss falls fastest with optimizer.lr={curve.suggestion:.1e}"
    end = f"; it diverges at {curve.rates[-1]:.1e}" if steps < planned else ""
    return f"{format_columns(rows)}\n\n{advice}{end}"
