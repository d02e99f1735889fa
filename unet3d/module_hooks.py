"""Find hooks, which whoever reads the parameters of a module without calling it would skip."""

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
