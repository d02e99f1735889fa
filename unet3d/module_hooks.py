"""Find what a call of a module runs besides its class's forward, and what would be skipped."""

from functools import partial
from typing import Any

import torch
from torch import nn

GLOBAL_HOOKS = tuple(
    getattr(torch.nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)
"""Hooks on every module, in torch 2.13."""

OBSERVERS = ("unet3d.", "torch.utils.")
"""Modules whose hooks on every module only watch: memory, and torch's counter of operations."""


def has_global_hook() -> bool:
    """Return whether every module has a hook that may change what it computes."""
    hooks = (hook for known in GLOBAL_HOOKS for hook in known.values())
    return any(not str(getattr(hook, "__module__", "")).startswith(OBSERVERS) for hook in hooks)


def get_forward(module: nn.Module) -> Any:
    """Return what a call of a module runs, as a function of the module and its inputs.

    A forward that was set on the module comes before that of its class, but for one that a strategy
    has set, which is replaced.
    """
    own = vars(module).get("forward")
    if own is None:
        return type(module).forward
    if isinstance(own, partial) and own.func.__module__.startswith("unet3d.checkpointing."):
        return own.args[0]
    return own.__func__ if getattr(own, "__self__", None) is module else partial(_call, own)


def _call(forward: Any, module: nn.Module, *inputs: Any, **options: Any) -> Any:
    return forward(*inputs, **options)


def find_hook(module: Any) -> nn.Module | None:
    """Return the first of the module and its submodules that has a hook or another forward."""
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
        return module
    if own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return module
    for child in own["_modules"].values():
        if child is not None and (found := find_hook(child)) is not None:
            return found
    return None
