"""Suggest overrides for a run that does not learn."""

from unet3d.config.settings.training import TrainingSettings
from unet3d.config.values import format_duration
from unet3d.report.training_warnings import SuggestedOverrides

HIGH_FOREGROUND_FRACTION = 0.9
"""The foreground fraction that is suggested to a run with less."""


def suggest_overrides(
    settings: TrainingSettings, *, out_of_time: bool = False
) -> SuggestedOverrides:
    """Return overrides for each kind of warning; only keys that the network has.

    A run that was `out_of_time` is not asked for more steps, epochs or channels.
    """
    width = settings.network.model.arguments.get("width")
    if settings.network.model.arguments.get("channels") is not None:
        width = None
    batches, volumes = settings.trainer.accumulate_grad_batches, settings.data.batch_size
    cheaper = [f"trainer.accumulate_grad_batches={batches // 2}"] if batches > 1 else []
    cheaper += [f"data.batch_size={volumes // 2}"] if volumes > 1 else []
    cheaper += [f"model.width={width // 2}"] if isinstance(width, int) and width > 1 else []
    longer = double_limits(settings, out_of_time=out_of_time)
    for_class = [] if settings.network.prior_bias else ["model.prior_bias=true"]
    for_class.append(longer)
    if settings.data.foreground_fraction < HIGH_FOREGROUND_FRACTION:
        for_class.append(f"data.foreground_fraction={HIGH_FOREGROUND_FRACTION}")
    if isinstance(width, int) and not out_of_time:
        for_class.append(f"model.width={2 * width}")
    lr = settings.optimizer.arguments.get("lr")
    has_lr = isinstance(lr, int | float) and lr > 0
    return SuggestedOverrides(
        run_too_short=[longer],
        class_not_learned=for_class,
        loss_not_falling=[f"optimizer.lr={lr * factor:g}" for factor in (0.1, 10)]
        if has_lr
        else [],
        cheaper_step=[*cheaper, "a smaller data.patch_size"],
        lower_rate=f"lower optimizer.lr={lr:g} (unet3d lr suggests one)"
        if has_lr
        else SuggestedOverrides.lower_rate,
    )


def double_limits(settings: TrainingSettings, *, out_of_time: bool) -> str:
    """Return twice the limits of a run as overrides; if it was `out_of_time`, of time alone."""
    trainer = settings.trainer
    overrides = []
    if trainer.max_steps is not None and not out_of_time:
        overrides.append(f"trainer.max_steps={2 * trainer.max_steps}")
    if trainer.max_epochs is not None and not out_of_time:
        overrides.append(f"trainer.max_epochs={2 * trainer.max_epochs}")
    if trainer.max_seconds is not None:
        overrides.append(f"trainer.max_time={format_duration(2 * trainer.max_seconds)}")
    return " ".join(overrides)
