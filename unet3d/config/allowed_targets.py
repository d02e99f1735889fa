"""What a `_target_` may name: configs and checkpoints choose among this code and no other."""

from collections.abc import Iterator, Sequence
from inspect import isclass, isfunction
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from unet3d.errors import UsageError

ALLOWED = (
    *("unet3d.data", "unet3d.model", "unet3d.pool", "unet3d.loss", "unet3d.checkpointing"),
    *("unet3d.lit.lr_schedule", "unet3d.lit.fault_tolerant_io.FaultTolerantTensorBoardLogger"),
    *("monai.networks.nets", "monai.losses", "torch.nn", "torch.optim"),
    *("lightning.pytorch.Trainer", "lightning.pytorch.trainer", "lightning.pytorch.loggers"),
)
"""Packages, modules and names. To make an object of their classes does no harm; some of their
functions fetch, write or load files, so that no function counts."""

NEVER = ("monai.losses.perceptual", "monai.networks.nets.hovernet")
"""Classes that fetch from any address, or run code that they fetched."""


def check_targets(node: DictConfig) -> None:
    """Refuse a node that names other code, at any depth: Hydra makes nested nodes as well."""
    where = str(node._get_full_key(None))
    for target in iter_targets(OmegaConf.to_container(node, resolve=True), where):
        resolve_target(*target, added=get_user_packages(node))


def get_target(node: DictConfig) -> Any:
    """What a node's `_target_` names."""
    key = f"{node._get_full_key(None)}._target_".lstrip(".")
    return resolve_target(key, node.get("_target_"), added=get_user_packages(node))


def get_user_packages(node: DictConfig) -> list[str]:
    """`allow_targets` of the config that a node is part of."""
    root: Any = OmegaConf.to_container(node._get_root())
    names = root.get("allow_targets") or []
    good = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not good or not all(part.isidentifier() for name in names for part in name.split(".")):
        raise UsageError(
            f"allow_targets must be a list of packages, as in [my_package], got {names!r}"
        )
    return names


def iter_targets(values: Any, where: str) -> Iterator[tuple[str, Any]]:
    """(key, name) of every `_target_` in plain values.

    >>> list(iter_targets({"a": [{"_target_": "torch.nn.ReLU"}]}, "model"))
    [('model.a.0._target_', 'torch.nn.ReLU')]
    """
    pairs = enumerate(values) if isinstance(values, list) else ()
    for key, value in values.items() if isinstance(values, dict) else pairs:
        path = f"{where}.{key}".lstrip(".")
        if key == "_target_":
            yield path, value
        else:
            yield from iter_targets(value, path)


def resolve_target(key: str, name: Any, *, added: Sequence[str]) -> Any:
    """The class or function of a name.

    Modules import others, so that `torch.nn.modules.module.torch.hub.load` begins well: where a
    thing is defined has to lie on the list, too. What is not on it is not even imported.
    """
    if not isinstance(name, str) or not is_inside(name, (*ALLOWED, *added)):
        raise forbidden_target_error(key, name)
    try:
        found = get_object(name)
    except Exception as error:
        raise UsageError(f"{key}: there is no {name}: {str(error).splitlines()[0]}") from error
    home = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    trusted = is_inside(home, added)
    if not trusted and (not is_inside(home, ALLOWED) or is_inside(home, NEVER)):
        raise forbidden_target_error(key, f"{name} (which is {home})" if name != home else name)
    if not isclass(found) and not (trusted and isfunction(found)):
        raise forbidden_target_error(key, f"{name}, which is no class")
    return found


def is_inside(name: str, places: Sequence[str]) -> bool:
    """Whether a dotted name is one of the places or lies in one.

    >>> is_inside("torch.nn.ReLU", ["torch.nn"]), is_inside("torch.nnx.ReLU", ["torch.nn"])
    (True, False)
    """
    return any(name == place or name.startswith(f"{place}.") for place in places)


def forbidden_target_error(key: str, name: Any) -> UsageError:
    """What was named, what may be, and how to change that."""
    return UsageError(
        f"{key} names {name}: a config or a checkpoint may only name classes of "
        f"{', '.join(ALLOWED)}; allow_targets=[my_package] on the command line adds a package "
        "that you trust"
    )
