"""Compare what a checkpoint holds with the run that it is loaded into, before it is.

Lightning and callbacks trust what they load. So every part that a run restores must look like what
the run itself would save.
"""

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, Timer
from packaging.version import InvalidVersion, Version
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from unet3d.checkpoint_file import find_mismatch
from unet3d.lit.callbacks.lr import TorchSchedule
from unet3d.lit.callbacks.stopping import StoppingLimits
from unet3d.lit.callbacks.weight_averaging import WeightAveraging
from unet3d.lit.module import SegmentationModule
from unet3d.lit.optimizer_checks import Found, find_odd_optimizer, is_known_part
from unet3d.lit.state_types import (
    is_alike,
    is_count,
    is_equal,
    is_number,
    matches,
    shorten,
)

SCHEDULE_PROGRESS = (
    *("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial"),
    *("T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"),
)
"""Values of torch's schedulers that change as they step."""

SCHEDULE_STEPS = ("last_epoch", "_step_count")
"""Those that are at most the steps of the run, and one of the start."""


def find_problem(
    content: Mapping[str, Any], module: SegmentationModule, trainer: pl.Trainer
) -> Found:
    """Return what in a checkpoint does not fit into a run; None if everything does."""
    own = module.state_dict()
    counts = {key: content.get(key, 0) for key in ("epoch", "global_step", "skipped_steps")}
    for key, value in counts.items():
        if not is_count(value):
            return f"{key} is {shorten(value)}"
    version = content.get("pytorch-lightning_version")
    if not isinstance(version, str) or not _is_version(version):
        return f"pytorch-lightning_version is {shorten(version)}"
    if "native_amp_scaling_state" in content:
        return "native_amp_scaling_state is of another version of Lightning"
    weights = content.get("state_dict")
    if not isinstance(weights, dict):
        return f"state_dict is {shorten(weights)}"
    optimizers, schedulers = content.get("optimizer_states"), content.get("lr_schedulers")
    if not isinstance(optimizers, list) or len(optimizers) != 1:
        return f"optimizer_states is {shorten(optimizers)}"
    if schedulers != []:
        return f"lr_schedulers is {shorten(schedulers)}"
    optimizer = module.configure_optimizers()
    schedules = {  # they add hyperparameters to the optimizer
        callback.state_key: callback.make_scheduler(optimizer=optimizer)
        for callback in _list_callbacks(trainer)
        if isinstance(callback, TorchSchedule)
    }
    return (
        find_mismatch(own, weights)
        or find_odd_average(content, own, trainer)
        or find_odd_scaler(content, trainer)
        or find_odd_callback(content.get("callbacks"), trainer, schedules, counts["global_step"])
        or find_odd_optimizer(
            optimizers[0],
            optimizer,
            is_known=all(map(is_known_part, (optimizer, *schedules.values()))),
            has_stepped=_has_stepped(counts, trainer),
        )
    )


def _is_version(text: str) -> bool:
    """Return whether this names a Lightning whose checkpoints are not converted when loaded."""
    try:
        return Version("2") <= Version(text) < Version("3.dev0")
    except InvalidVersion:
        return False


def find_odd_average(
    content: Mapping[str, Any], own: Mapping[str, Tensor], trainer: pl.Trainer
) -> Found:
    """Return what is wrong with the weights beside an average of them."""
    if not any(isinstance(callback, WeightAveraging) for callback in _list_callbacks(trainer)):
        return None
    trained, steps = content.get("trained_weights"), content.get("averaged_steps")
    if not isinstance(trained, dict) or not is_count(steps):
        return "it has no average of the weights (ema_decay)"
    names = [
        name
        for name, value in own.items()
        if name.startswith(WeightAveraging.PREFIX) and value.is_floating_point()
    ]
    mismatch = find_mismatch({name: own[name] for name in names}, trained)
    if mismatch is not None:
        return f"trained_weights: {mismatch}"
    for name in names:
        if not trained[name].isfinite().all():
            return f"trained_weights: {name} contains NaN or infinite values"
    return None


def find_odd_scaler(content: Mapping[str, Any], trainer: pl.Trainer) -> Found:
    """Return what is wrong with the state of the precision, such as a loss scale."""
    plugin = trainer.precision_plugin
    key = type(plugin).__qualname__
    own, saved = plugin.state_dict(), content.get(key, {})
    fits = is_alike(saved, own) and all(
        _fits_loss_scale(name, saved[name], value) for name, value in own.items()
    )
    return None if fits else f"{key} is {shorten(saved)}"


def _fits_loss_scale(name: str, saved: Any, own: Any) -> bool:
    if name == "scale":
        return isfinite(saved) and saved > 0
    return is_count(saved) if name == "_growth_tracker" else is_equal(saved, own)


def find_odd_callback(
    states: Any, trainer: pl.Trainer, schedules: Mapping[str, LRScheduler], steps: int
) -> Found:
    """Return what is wrong with the states of callbacks that say what they save.

    Others, most of Lightning's and those of users, check their states themselves.
    """
    if not isinstance(states, dict):
        return f"callbacks is {shorten(states)}"
    for callback in _list_callbacks(trainer):
        key = callback.state_key
        expected = getattr(callback, "STATE", None)
        if key in schedules:
            fits = _fits_schedule if is_known_part(schedules[key]) else is_alike
            saved = states.get(key)
            if not fits(saved, schedules[key].state_dict()) or _is_ahead(saved, steps):
                return f"callbacks.{key} is not the state of this scheduler"
        elif key not in states and not isinstance(callback, StoppingLimits):
            continue  # one that the run has been given since
        elif expected is not None and not matches(states.get(key), expected):
            return f"callbacks.{key} is {shorten(states.get(key))}"
        elif type(callback) in (EarlyStopping, Timer) and not _fits_fresh(
            states[key], callback.state_dict()
        ):
            return f"callbacks.{key} is {shorten(states[key])}"
    return None


def _fits_fresh(saved: Any, own: Mapping[str, Any]) -> bool:
    """Return whether a state has the values of a fresh one in kind; what is None may be any."""
    same = isinstance(saved, dict) and saved.keys() == own.keys()
    return same and all(
        isinstance(saved[key], Tensor) == isinstance(value, Tensor) and is_alike(saved[key], value)
        for key, value in own.items()
        if value is not None
    )


def _is_ahead(saved: Any, steps: int) -> bool:
    """Return whether a scheduler, or one within it, has stepped more often than the run."""
    if isinstance(saved, Mapping):
        return any(
            is_number(value) and value > steps + 1
            if key in SCHEDULE_STEPS
            else _is_ahead(value, steps)
            for key, value in saved.items()
        )
    return isinstance(saved, list | tuple) and any(_is_ahead(part, steps) for part in saved)


def _fits_schedule(saved: Any, own: Any) -> bool:
    """Return whether a scheduler's state differs from a fresh one's in its progress alone."""
    if isinstance(own, Mapping):
        return is_alike(saved, own) and all(
            _is_progress(saved[key], own[key])
            if key in SCHEDULE_PROGRESS
            else _fits_schedule(saved[key], own[key])
            for key in own
        )
    if isinstance(own, list | tuple):
        return is_alike(saved, own) and all(map(_fits_schedule, saved, own))
    return is_equal(saved, own)


def _is_progress(saved: Any, own: Any) -> bool:
    """Return whether values, which are alike, can be counts, learning rates or a best metric."""
    if isinstance(own, list | tuple):
        return all(map(_is_progress, saved, own))
    if not is_number(own):
        return True
    lowest = int(type(own) is int and own > 0)
    return is_number(saved) and saved >= (min(own, lowest) if isfinite(own) else -inf)


def _list_callbacks(trainer: Any) -> Sequence[pl.Callback]:
    return trainer.callbacks


def _has_stepped(counts: Mapping[str, int], trainer: pl.Trainer) -> bool:
    """Return whether the optimizer must have changed weights.

    The last step may have been skipped, which is counted with the next batch. With a loss scale,
    all of the first ones may have been, uncounted.
    """
    is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
    return not is_scaled and counts["global_step"] > counts["skipped_steps"] + 1
