"""Find what a `_target_` names, if it may: config/constructors.py lists it."""

from collections.abc import Iterator, Sequence
from inspect import isclass, isfunction
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, Node

from unet3d.config.constructors import CONFIGURED, NETWORKS, TRAINER, Constructors
from unet3d.errors import UsageError, summarize_error


def check_targets(
    arguments: Any,
    key: str,
    user_packages: Sequence[str] = (),
    allowed: Constructors = CONFIGURED,
) -> None:
    """Refuse arguments that name other code, at any depth: Hydra builds nested nodes too."""
    for target in iter_targets(arguments, key):
        resolve_target(*target, user_packages=user_packages, allowed=allowed)


def read_allowed_packages(config: DictConfig) -> tuple[str, ...]:
    """Read `allow_targets`: packages of the user's that targets may name."""
    node = config._get_node("allow_targets") if "allow_targets" in set(config) else None
    if node is None or (isinstance(node, Node) and node._is_none()):
        return ()
    value: Any = node
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
    key: str, name: Any, *, user_packages: Sequence[str], allowed: Constructors = CONFIGURED
) -> Any:
    """Return the class or function of a name.

    Modules import others, so `torch.nn.modules.conv.torch.hub.load` starts like an allowed name:
    where a thing is defined must be allowed, too. A name that is not allowed is not even imported.
    """
    allowed = check_name(key, name, user_packages, allowed)
    try:
        target = get_object(name)
    except Exception as error:
        raise UsageError(f"{key}: cannot import {name}: {summarize_error(error)}") from error
    home = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    trusted = is_inside(home, user_packages)
    if not trusted and not is_listed(home, allowed):
        described = f"{name} (defined as {home})" if name != home else name
        raise make_forbidden_target_error(key, described, allowed)
    if not isclass(target) and not (trusted and isfunction(target)):
        raise make_forbidden_target_error(key, f"{name}, which is not a class", allowed)
    return target


def is_listed(name: str, allowed: Constructors) -> bool:
    """Return whether a dotted name is that of a class in the lists, wherever its package has it.

    >>> is_listed("torch.nn.modules.activation.ReLU", {"torch.nn": frozenset({"ReLU"})})
    True
    """
    module, _, own = name.rpartition(".")
    return any(own in names and is_inside(module, (package,)) for package, names in allowed.items())


def check_name(
    key: str, name: Any, user_packages: Sequence[str], allowed: Constructors = CONFIGURED
) -> Constructors:
    """Refuse a name that is not listed, without importing it; return the lists for its key."""
    if key == "trainer._target_":
        allowed = {**allowed, **TRAINER}
    if isinstance(name, str) and (is_inside(name, user_packages) or is_listed(name, allowed)):
        return allowed
    raise make_forbidden_target_error(key, name, allowed)


def is_inside(name: str, packages: Sequence[str]) -> bool:
    """Return whether a dotted name is one of the packages or lies in one.

    >>> is_inside("torch.nn.ReLU", ["torch.nn"]), is_inside("torch.nnx.ReLU", ["torch.nn"])
    (True, False)
    """
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def make_forbidden_target_error(key: str, name: Any, allowed: Constructors) -> UsageError:
    """Say what was named, what may be named, and how to allow more."""
    classes = "classes of unet3d, losses and networks of MONAI, layers and optimizers of torch"
    owner = f"a config may only name {classes}"
    if allowed is NETWORKS:
        owner = "a checkpoint may only name networks of unet3d and MONAI and layers of torch"
    return UsageError(
        f"{key} names {name}: {owner}, and of these only what neither downloads nor writes files; "
        "allow_targets=[my_package] on the command line adds a package that you trust"
    )
