"""Compare what a checkpoint holds with the run that it is loaded into, before it is.

Optimizers and loops trust what they load: an optimizer's kernel writes to a state of another size
beyond its end. So every part that a run restores must look like what the run itself would save.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from inspect import signature
from math import inf, isfinite
from typing import Any

import lightning.pytorch as pl
import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unet3d.checkpoint_file import find_mismatch
from unet3d.errors import summarize_error
from unet3d.lit.callbacks.lr import TorchSchedule
from unet3d.lit.callbacks.weight_averaging import WeightAveraging
from unet3d.lit.module import SegmentationModule
from unet3d.lit.state_types import is_alike, is_count, is_number, matches

Found = str | None
"""What is wrong; None if nothing."""

NOT_NEGATIVE = (
    *("step", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf"),
    *("row_var", "col_var", "variance", "mu_product", "step_size", "eta", "mu"),
)
"""States of torch's optimizers that count steps, or average squares and other sizes."""

OWN_HYPERPARAMETERS = ("initial_lr", "lr_factor", "starts_at")
"""Hyperparameters of a group that our schedules read, whatever the optimizer."""

ROUNDING = 1e-9
"""Error of a momentum that moves between two bounds."""

SCHEDULE_PROGRESS = (
    *("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial"),
    *("T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"),
)
"""Values of torch's schedulers that change as they step."""


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
        or find_odd_callback(content.get("callbacks"), trainer, schedules)
        or find_odd_optimizer(
            optimizers[0],
            optimizer,
            is_known=all(map(_is_known, (optimizer, *schedules.values()))),
            has_stepped=_has_stepped(counts, trainer),
        )
    )


def _is_version(text: str) -> bool:
    """Return whether this names a Lightning whose checkpoints are not converted when loaded."""
    try:
        return Version(text).major == 2
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
    return is_count(saved) if name == "_growth_tracker" else _is_equal(saved, own)


def find_odd_callback(
    states: Any, trainer: pl.Trainer, schedules: Mapping[str, LRScheduler]
) -> Found:
    """Return what is wrong with the states of callbacks that say what they save.

    Others, of Lightning or a user, check their states themselves.
    """
    if not isinstance(states, dict):
        return f"callbacks is {shorten(states)}"
    for callback in _list_callbacks(trainer):
        key = callback.state_key
        expected = getattr(callback, "STATE", None)
        if key in schedules:
            fits = _fits_schedule if _is_known(schedules[key]) else is_alike
            if not fits(states.get(key), schedules[key].state_dict()):
                return f"callbacks.{key} is not the state of this scheduler"
        elif key not in states:
            continue
        elif expected is not None and not matches(states[key], expected):
            return f"callbacks.{key} is {shorten(states[key])}"
    return None


def _is_known(part: object) -> bool:
    """Return whether we know which values of an optimizer or a scheduler change."""
    return type(part).__module__.partition(".")[0] in ("torch", "unet3d")


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
    return _is_equal(saved, own)


def _is_progress(saved: Any, own: Any) -> bool:
    """Return whether values, which are alike, can be counts, learning rates or a best metric."""
    if isinstance(own, list | tuple):
        return all(map(_is_progress, saved, own))
    if not is_number(own):
        return True
    lowest = int(type(own) is int and own > 0)
    return is_number(saved) and saved >= (min(own, lowest) if isfinite(own) else -inf)


def _is_equal(saved: Any, own: Any) -> bool:
    """Return whether values are the same numbers of the same kinds, or the same names."""
    if isinstance(saved, Tensor) or isinstance(own, Tensor):
        return isinstance(saved, Tensor) and isinstance(own, Tensor) and saved.equal(own)
    if isinstance(own, list | tuple):
        return is_alike(saved, own) and all(map(_is_equal, saved, own))
    return is_alike(saved, own) and saved == own


def _list_callbacks(trainer: Any) -> Sequence[pl.Callback]:
    return trainer.callbacks


def _has_stepped(counts: Mapping[str, int], trainer: pl.Trainer) -> bool:
    """Return whether the optimizer must have changed weights.

    The last step may have been skipped, which is counted with the next batch. With a loss scale,
    all of the first ones may have been, uncounted.
    """
    is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
    return not is_scaled and counts["global_step"] > counts["skipped_steps"] + 1


def find_odd_optimizer(
    saved: Any, optimizer: Optimizer, *, is_known: bool = True, has_stepped: bool = False
) -> Found:
    """Return what is wrong with the state that an optimizer, which has not stepped yet, is to load.

    Its hyperparameters are compared with the run's if it is known which of them change.
    """
    own = optimizer.state_dict()
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        return "optimizer_states[0] has no state"
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(own["param_groups"]):
        return f"the optimizer has {len(own['param_groups'])} groups of parameters"
    for number, (given, expected) in enumerate(zip(groups, own["param_groups"], strict=True)):
        problem = find_odd_group(given, expected, is_known=is_known)
        problem = problem or find_bad_hyperparameters(given, optimizer)
        if problem is not None:
            return f"optimizer_states[0].param_groups[{number}]: {problem}"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stepped = predict_states(optimizer)
    # Some may have none: a parameter that the network does not use has no gradient.
    has_state = any(stepped[n] for n, p in enumerate(parameters) if p.requires_grad)
    if has_stepped and has_state and not saved["state"]:
        return "optimizer_states[0].state is empty, but the optimizer has stepped"
    is_torch = _is_known(optimizer)
    storages: set[int] = set()
    for key, state in saved["state"].items():
        where = f"optimizer_states[0].state[{key!r}]"
        if type(key) is not int or not 0 <= key < len(parameters):
            return f"{where} belongs to no parameter"
        if not isinstance(state, dict):
            return f"{where} is {shorten(state)}"
        expected = stepped[key]
        if expected is not None and is_torch and state.keys() != expected.keys():
            return f"{where} has {', '.join(map(str, state))}, not {', '.join(expected)}"
        for name, value in state.items():
            problem = find_odd_state(value, (expected or {}).get(name), parameters[key])
            if problem is None and is_torch:
                problem = find_odd_numbers(name, value)
            if problem is not None:
                return f"{where}.{name} {problem}"
            if isinstance(value, Tensor) and value.numel():
                start = value.untyped_storage().data_ptr()
                if start in storages:
                    return f"{where}.{name} shares its values with another state"
                storages.add(start)
    return None


def find_odd_group(saved: Any, own: Mapping[str, Any], *, is_known: bool) -> Found:
    """Return which hyperparameters differ from the run's, which loading them would replace.

    Of an optimizer that is not known, any number may have changed as it stepped.
    """
    if not isinstance(saved, dict) or saved.get("params") != own["params"]:
        return "its parameters are not those of this run"
    if not all(type(n) is int for n in saved["params"]):
        return "its parameters are not numbered"
    for key, value in own.items():
        is_option = isinstance(value, bool | None)
        if key == "params" or (key not in saved and is_option):
            continue  # one that an older torch did not have
        if key not in saved:
            return f"it has no {key}"
        if not _fits_hyperparameter(key, saved[key], own, is_known=is_known):
            return f"{key} is {shorten(saved[key])}, not {shorten(value)}"
    for key, value in saved.items():
        values = value if isinstance(value, list | tuple) else [value]
        if key != "params" and not all(map(_is_hyperparameter, values)):
            return f"{key} is {shorten(value)}"
        is_number_of_torch = is_known and not isinstance(value, bool | None)
        if key not in own and (is_number_of_torch or key in OWN_HYPERPARAMETERS):
            return f"{key} is {shorten(value)}, and this run has none"
    return None


def _fits_hyperparameter(key: str, saved: Any, group: Mapping[str, Any], *, is_known: bool) -> bool:
    own = group[key]
    if key in OWN_HYPERPARAMETERS or isinstance(own, bool | None):
        return _is_equal(saved, own)
    if not is_known:
        return is_alike(saved, own)
    if key == "lr":
        return is_alike(saved, own) and isinstance(saved, Tensor) == isinstance(own, Tensor)
    if key in ("betas", "momentum") and "max_momentum" in group and is_alike(saved, own):
        # A cycle of the learning rate moves the momentum, which is the first of the betas.
        moved, *fixed = saved if key == "betas" else (saved,)
        low, high = group["base_momentum"] - ROUNDING, group["max_momentum"] + ROUNDING
        same = key == "momentum" or _is_equal(fixed, list(own[1:]))
        return same and is_number(moved) and low <= moved <= high
    return _is_equal(saved, own)


def _is_hyperparameter(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.is_floating_point() and bool(value.isfinite())
    return value is None or isinstance(value, str | bool) or _is_finite(value)


def _is_finite(value: Any) -> bool:
    return is_number(value) and isfinite(value)


def find_bad_hyperparameters(saved: Mapping[str, Any], optimizer: Optimizer) -> Found:
    """Return why the optimizer would not take these values from a config."""
    names = signature(type(optimizer)).parameters.keys() & saved.keys() - {"params"}
    try:
        type(optimizer)([nn.Parameter(torch.zeros(1))], **{name: saved[name] for name in names})
    except (ValueError, RuntimeError) as error:
        return summarize_error(error)
    except TypeError:  # of a user's: it takes other arguments than it keeps
        return None
    return None


def find_odd_state(value: Any, expected: Any, parameter: Tensor) -> Found:
    """Return how a value of a state differs from the one that a step of this optimizer makes."""
    like = parameter if expected is None else expected
    if isinstance(value, Tensor):
        if expected is not None and not isinstance(expected, Tensor):
            return f"is a tensor, not {shorten(expected)}"
        shape, own = list(value.shape), list(like.shape)
        if shape != own and (expected is not None or value.numel() > parameter.numel()):
            return f"has the shape {shape}, not {own}"
        if value.is_floating_point() != like.is_floating_point() and expected is not None:
            return f"is of {value.dtype}, not of {like.dtype}"
        if expected is not None and not _are_stored_alike(value, like):
            return f"has the strides {list(value.stride())}, not {list(like.stride())}"
        if value.dim() == 0 and not value.isfinite():
            return f"is {value.item()}"
        return None
    if isinstance(expected, Tensor):
        return f"is {shorten(value)}, not a tensor"
    return None if is_alike(value, like if expected is not None else value) else "is not alike"


def _are_stored_alike(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors of one shape have one memory layout, which fused kernels rely on."""
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return not a.numel() or all(size == 1 or x == y for size, x, y in strides)


def find_odd_numbers(name: Any, value: Any) -> Found:
    """Return why no step of torch's optimizers gives a state these numbers."""
    if not isinstance(value, Tensor | int | float):
        return None
    numbers = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if not numbers.is_floating_point() or not numbers.numel():
        return None
    low, high = (bound.item() for bound in numbers.aminmax())
    if not isfinite(low) or not isfinite(high):
        return "contains NaN or infinite values"
    return f"has the value {low:.4g}, below 0" if low < 0 and name in NOT_NEGATIVE else None


def predict_states(optimizer: Optimizer) -> list[dict[str, Any] | None]:
    """Return the state that a step of the optimizer gives each parameter.

    Copies of the parameters step, one of each size and memory layout. None where they cannot alone.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states: dict[Any, dict[str, Any] | None] = {}
    keys: list[Any] = []
    with torch.random.fork_rng(devices=[]):
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                keys.append((number, parameter.shape, parameter.stride(), parameter.dtype))
                if keys[-1] in states:
                    continue
                copy = nn.Parameter(torch.zeros_like(parameter, device="cpu"))
                copy.grad = torch.zeros_like(copy)
                stepping = deepcopy(optimizer, {id(p): p for p in parameters})
                stepping.param_groups = [{**group, "params": [copy]}]
                try:
                    stepping.step()
                except Exception:  # a user's, or one that needs a closure
                    states[keys[-1]] = None
                else:
                    values = dict(stepping.state[copy])
                    states[keys[-1]] = {
                        k: v.to("meta") if isinstance(v, Tensor) else v for k, v in values.items()
                    }
    return [states[key] for key in keys]


def shorten(value: Any) -> str:
    """Return a value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of {list(value.shape)}"
    text = " ".join(repr(value)[:200].split())
    return text if len(text) < 60 else f"{text[:60]}..."
