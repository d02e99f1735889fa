"""What to try when a training goes wrong: overrides, made of what its config has now."""

from collections.abc import Mapping
from typing import Any

from unet3d.lit.callbacks.stopping import parse_max_time
from unet3d.report.diagnosis import Remedies

MUCH_FOREGROUND = 0.9
"""The share of patches around foreground that is proposed to a run with less."""


def suggest_remedies(config: Mapping[str, Any], default_epochs: int) -> Remedies:
    """For each kind of warning; a key that the network does not have is not proposed."""
    model, data = config["model"], config["data"]
    learned = []
    if model.get("prior_bias") is False:
        learned.append("model.prior_bias=true")
    learned.append(double_limits(config["trainer"], default_epochs))
    if data["foreground_fraction"] < MUCH_FOREGROUND:
        learned.append(f"data.foreground_fraction={MUCH_FOREGROUND}")
    if isinstance(model.get("width"), int) and model.get("channels") is None:
        learned.append(f"model.width={2 * model['width']}")
    rate = config["optimizer"].get("lr")
    known = isinstance(rate, int | float) and rate > 0
    rates = [f"optimizer.lr={rate * factor:g}" for factor in (0.1, 10)] if known else []
    return Remedies(
        run_too_short=[double_limits(config["trainer"], default_epochs)],
        class_not_learned=learned,
        loss_not_falling=rates,
    )


def double_limits(trainer: Mapping[str, Any], default_epochs: int) -> str:
    """Twice the limits of a run.

    >>> double_limits({"max_steps": None, "max_epochs": None, "max_time": "00:20:30:00"}, 20)
    'trainer.max_time=01:17:00:00'
    """
    limits = {k: trainer[k] for k in ("max_steps", "max_epochs") if trainer[k] is not None}
    time = parse_max_time(trainer["max_time"])
    if not limits and time is None:
        limits = {"max_epochs": default_epochs}
    words = [f"trainer.{key}={2 * value}" for key, value in limits.items()]
    if time is not None:
        minutes, s = divmod(round(2 * time), 60)
        hours, m = divmod(minutes, 60)
        d, h = divmod(hours, 24)
        words.append(f"trainer.max_time={d:02}:{h:02}:{m:02}:{s:02}")
    return " ".join(words)
