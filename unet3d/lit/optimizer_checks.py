"""Compare the saved state of an optimizer with the optimizer that is to load it.

Optimizers trust what they load: a kernel writes to a state of another size beyond its end.
"""

from collections.abc import Mapping
from copy import deepcopy
from inspect import signature
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unet3d.errors import summarize_error
from unet3d.lit.state_types import is_alike, is_equal, is_number, shorten

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


def is_known_part(part: object) -> bool:
    """Return whether we know which values of an optimizer or a scheduler change."""
    return type(part).__module__.partition(".")[0] in ("torch", "unet3d")


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
    is_torch = is_known_part(optimizer)
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
        return is_equal(saved, own)
    if not is_known:
        return is_alike(saved, own)
    if key == "lr":
        return is_alike(saved, own) and isinstance(saved, Tensor) == isinstance(own, Tensor)
    if key in ("betas", "momentum") and "max_momentum" in group and is_alike(saved, own):
        # A cycle of the learning rate moves the momentum, which is the first of the betas.
        moved, *fixed = saved if key == "betas" else (saved,)
        low, high = group["base_momentum"] - ROUNDING, group["max_momentum"] + ROUNDING
        same = key == "momentum" or is_equal(fixed, list(own[1:]))
        return same and is_number(moved) and low <= moved <= high
    return is_equal(saved, own)


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
