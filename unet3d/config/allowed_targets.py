"""What a `_target_` may name: a config chooses among this code, a checkpoint among networks."""

from collections.abc import Iterator, Sequence
from inspect import isclass, isfunction
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

from unet3d.errors import UsageError, summarize_error

NETWORKS = ("unet3d.model", "unet3d.pool", "monai.networks.nets", "torch.nn")
"""What a checkpoint may name: packages, modules and names."""

ALLOWED = (
    *NETWORKS,
    *(
        "unet3d.data",
        "unet3d.loss",
        "unet3d.metric",
        "unet3d.checkpointing",
        "unet3d.lit.lr_schedule",
    ),
    *("unet3d.lit.callbacks", "unet3d.lit.loggers", "monai.losses", "torch.optim"),
    *("lightning.pytorch.Trainer", "lightning.pytorch.trainer"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers"),
)
"""What a config may name. Building an object of their classes is harmless; some of their functions
download, write or load files, so functions are refused."""

FORBIDDEN = ("monai.losses.perceptual", "monai.networks.nets.hovernet")
"""Classes that download from any address, or run code that they downloaded."""


def check_targets(
    arguments: Any, key: str, user_packages: Sequence[str] = (), allowed: Sequence[str] = ALLOWED
) -> None:
    """Refuse arguments that name other code, at any depth: Hydra builds nested nodes too."""
    for target in iter_targets(arguments, key):
        resolve_target(*target, user_packages=user_packages, allowed=allowed)


def read_allowed_packages(config: DictConfig) -> tuple[str, ...]:
    """Read `allow_targets`: packages of the user's that targets may name."""
    value = OmegaConf.select(config, "allow_targets")
    if value is None:
        return ()
    if not isinstance(value, ListConfig) or not all(map(_is_dotted_name, value)):
        raise UsageError(
            f"allow_targets must be a list of packages, as in [my_package], got {value!r}"
        )
    return tuple(value)


def _is_dotted_name(value: Any) -> bool:
    return isinstance(value, str) and all(map(str.isidentifier, value.split(".")))


def iter_targets(values: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, name) of every `_target_` in plain values.

    >>> list(iter_targets({"a": [{"_target_": "torch.nn.ReLU"}]}, "model"))
    [('model.a.0._target_', 'torch.nn.ReLU')]
    """
    pairs = enumerate(values) if isinstance(values, list | tuple) else ()
    for name, value in values.items() if isinstance(values, dict) else pairs:
        path = f"{key}.{name}".lstrip(".")
        if name == "_target_":
            yield path, value
        else:
            yield from iter_targets(value, path)


def resolve_target(
    key: str, name: Any, *, user_packages: Sequence[str], allowed: Sequence[str] = ALLOWED
) -> Any:
    """Return the class or function of a name.

    Modules import others, so `torch.nn.modules.module.torch.hub.load` starts like an allowed name:
    where a thing is defined must be allowed, too. A name that is not allowed is not even imported.
    """
    if not isinstance(name, str) or not is_inside(name, (*allowed, *user_packages)):
        raise make_forbidden_target_error(key, name, allowed)
    try:
        target = get_object(name)
    except Exception as error:
        raise UsageError(f"{key}: cannot import {name}: {summarize_error(error)}") from error
    home = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    trusted = is_inside(home, user_packages)
    if not trusted and (not is_inside(home, allowed) or is_inside(home, FORBIDDEN)):
        described = f"{name} (defined as {home})" if name != home else name
        raise make_forbidden_target_error(key, described, allowed)
    if not isclass(target) and not (trusted and isfunction(target)):
        raise make_forbidden_target_error(key, f"{name}, which is not a class", allowed)
    return target


def is_inside(name: str, packages: Sequence[str]) -> bool:
    """Return whether a dotted name is one of the packages or lies in one.

    >>> is_inside("torch.nn.ReLU", ["torch.nn"]), is_inside("torch.nnx.ReLU", ["torch.nn"])
    (True, False)
    """
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def make_forbidden_target_error(key: str, name: Any, allowed: Sequence[str]) -> UsageError:
    """Say what was named, what may be named, and how to allow more."""
    owner = "a checkpoint" if allowed is NETWORKS else "a config"
    return UsageError(
        f"{key} names {name}: {owner} may only name classes of "
        f"{', '.join(allowed)}; allow_targets=[my_package] on the command line adds a package "
        "that you trust"
    )
