"""Train for a few steps with a rising learning rate."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from unet3d.config.settings.lr import MIN_STEPS, LRSettings
from unet3d.config.settings.training import TrainingSettings
from unet3d.errors import RunError
from unet3d.lit.callbacks.checkpoints import LastCheckpoint
from unet3d.lit.callbacks.lr import LRSchedule, TorchSchedule
from unet3d.lit.callbacks.lr_range_test import LRRangeTest
from unet3d.report.lr_curve import LRCurve
from unet3d.workflows.training.build import build_training
from unet3d.workflows.training.run import TrainingRun


def try_learning_rates(settings: LRSettings, fit: Callable[[TrainingRun], None]) -> LRCurve:
    """Return the loss over the learning rate; nothing of the run is kept."""
    test = LRRangeTest(min_lr=settings.min_lr, max_lr=settings.max_lr, steps=settings.steps)
    with TemporaryDirectory() as folder:
        run = build_training(limit_to_steps(settings.training, settings.steps), Path(folder))
        callbacks = cast(Any, run.trainer).callbacks
        replaced = (LRSchedule, TorchSchedule, LastCheckpoint)
        callbacks[:] = [test, *(c for c in callbacks if not isinstance(c, replaced))]
        try:
            fit(run)
        except RunError:  # a loss or gradient that is not finite
            if len(test.curve.losses) < MIN_STEPS:
                raise
    return test.curve


def limit_to_steps(settings: TrainingSettings, steps: int) -> TrainingSettings:
    """Return the settings of a run of `steps`, without validation, loggers and callbacks."""
    trainer = settings.trainer
    return replace(
        settings,
        callbacks={},
        loggers={},
        resume=None,
        ema_decay=None,
        trainer=replace(
            trainer,
            factory=trainer.factory.bind(limit_val_batches=0, num_sanity_val_steps=0),
            max_steps=steps,
            max_epochs=None,
            max_seconds=None,
        ),
    )
