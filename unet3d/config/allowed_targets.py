"""Which classes a checkpoint or a bundle may name: unlike a config, it may be a stranger's."""

from collections.abc import Iterator, Sequence
from inspect import isclass, isfunction
from pkgutil import resolve_name
from typing import Any

from unet3d.errors import UsageError, summarize_error

NETWORKS = ("unet3d.model", "unet3d.pool", "monai.networks", "torch.nn")
"""Packages of the classes that a saved network may consist of."""

LAYOUTS = ("unet3d.data.layouts",)
"""Packages of the classes that list the cases of a dataset."""


def check_saved_config(
    values: Any, key: str, *, packages: Sequence[str], allow_targets: Sequence[str]
) -> None:
    """Refuse a part of a saved config that would run other code than that of these packages."""
    for path, value in iter_values(values, key):
        if path.endswith("._target_"):
            check_target(path, value, packages, allow_targets)
        elif isinstance(value, str) and "${" in value:  # Hydra would resolve it to anything
            raise UsageError(f"{path} is {value[:80]!r}: it must not hold ${{")


def check_target(
    key: str, name: Any, packages: Sequence[str], allow_targets: Sequence[str]
) -> None:
    """Refuse a name outside of these packages, and what they import from others.

    `torch.nn.modules.conv.torch.hub.load` starts like an allowed name: where a class is defined
    counts, too. A name outside of the packages is not even imported.
    """
    described = str(name)
    if isinstance(name, str) and is_inside(name, (*packages, *allow_targets)):
        target = import_target(key, name)
        home = getattr(target, "__module__", None) or "nowhere"
        is_ours = isclass(target) and is_inside(home, packages)
        is_allowed = (isclass(target) or isfunction(target)) and is_inside(home, allow_targets)
        if is_ours or is_allowed:
            return
        described = f"{name} (defined in {home})"
    raise UsageError(
        f"{key} names {described}: a file may only name classes of {', '.join(packages)}; "
        "allow_targets=[my_package] adds a package that you trust"
    )


def import_target(key: str, name: Any) -> Any:
    """Return what a `_target_` names."""
    try:
        return resolve_name(name)
    except Exception as error:  # a module may raise anything when it is imported
        raise UsageError(f"{key}: cannot import {name}: {summarize_error(error)}") from error


def iter_values(values: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the values at any depth with their keys; a `_target_` is one, whatever it holds."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    for name, value in pairs:
        path = f"{key}.{name}"
        if isinstance(value, dict | list | tuple) and name != "_target_":
            yield from iter_values(value, path)
        else:
            yield path, value


def is_inside(name: str, packages: Sequence[str]) -> bool:
    """Return whether a dotted name is one of the packages or lies in one.

    >>> is_inside("torch.nn.ReLU", ["torch.nn"]), is_inside("torch.nnx.ReLU", ["torch.nn"])
    (True, False)
    """
    return any(name == package or name.startswith(f"{package}.") for package in packages)
