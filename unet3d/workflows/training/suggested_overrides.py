"""Suggest overrides for a run that does not learn."""

from unet3d.config.settings.training import TrainingSettings
from unet3d.report.training_warnings import SuggestedOverrides

HIGH_FOREGROUND_FRACTION = 0.9
"""The foreground fraction that is suggested to a run with less."""


def suggest_overrides(settings: TrainingSettings) -> SuggestedOverrides:
    """Return overrides for each kind of warning; only keys that the network has."""
    arguments = settings.network.model.arguments
    longer = double_limits(settings)
    for_class = [] if settings.network.prior_bias else ["model.prior_bias=true"]
    for_class.append(longer)
    if settings.data.foreground_fraction < HIGH_FOREGROUND_FRACTION:
        for_class.append(f"data.foreground_fraction={HIGH_FOREGROUND_FRACTION}")
    if isinstance(arguments.get("width"), int) and arguments.get("channels") is None:
        for_class.append(f"model.width={2 * arguments['width']}")
    lr = settings.optimizer.arguments.get("lr")
    has_lr = isinstance(lr, int | float) and lr > 0
    return SuggestedOverrides(
        run_too_short=[longer],
        class_not_learned=for_class,
        loss_not_falling=[f"optimizer.lr={lr * factor:g}" for factor in (0.1, 10)]
        if has_lr
        else [],
    )


def double_limits(settings: TrainingSettings) -> str:
    """Return twice the limits of a run as overrides; parsed settings have at least one."""
    trainer = settings.trainer
    overrides = []
    if trainer.max_steps is not None:
        overrides.append(f"trainer.max_steps={2 * trainer.max_steps}")
    if trainer.max_epochs is not None:
        overrides.append(f"trainer.max_epochs={2 * trainer.max_epochs}")
    if trainer.max_seconds is not None:
        overrides.append(f"trainer.max_time={format_duration(2 * trainer.max_seconds)}")
    return " ".join(overrides)


def format_duration(seconds: float) -> str:
    """Format a duration as trainer.max_time takes it.

    >>> format_duration(147600)
    '01:17:00:00'
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    d, h = divmod(hours, 24)
    return f"{d:02}:{h:02}:{m:02}:{s:02}"
