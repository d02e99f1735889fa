"""Call what a `_target_` names: the one place where configs become code.

A user's own config may name anything; a checkpoint or a bundle, which may be a stranger's, only
classes of some packages.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from unet3d.config.compose import Config, compose_config, get_config_dir, to_plain
from unet3d.errors import UsageError, is_out_of_memory, summarize_error

NETWORKS = ("unet3d.model", "unet3d.pool", "monai.networks", "torch.nn")
"""Packages of the classes that a saved network may consist of."""

SOURCES = re.compile("url|path|file|weights|checkpoint|repo")
"""Parts of the names of arguments whose text says where a class of MONAI gets its weights from."""


@dataclass(frozen=True)
class Factory:
    """A `_target_` and its arguments; a call builds the object."""

    key: str  # where the config has it
    arguments: Mapping[str, Any]  # plain values, with `_target_`
    references: Mapping[str, str] = field(default_factory=dict)  # arguments that follow a key

    @property
    def target(self) -> Any:
        """Return the class or function that is called."""
        return import_target(f"{self.key}._target_", self.arguments.get("_target_"))

    def bind(self, **arguments: Any) -> "Factory":
        """Return the factory with other values for some arguments."""
        return replace(self, arguments={**self.arguments, **arguments})

    def bind_references(self, values: Mapping[str, Any]) -> "Factory":
        """Return the factory with other values for the arguments that follow these keys."""
        names = self.references.items()
        return self.bind(**{name: values[key] for name, key in names if key in values})

    def __call__(self, **objects: Any) -> Any:
        """Call the target with the arguments, and with objects that no config can hold.

        A factory with `_partial_: true` returns a partial of its target, unless objects are given.
        """
        target = self.target
        arguments = {name: v for name, v in self.arguments.items() if name not in objects}
        name = f"{self.key} (_target_: {self.arguments['_target_']})"
        try:
            call = hydra.utils.instantiate(arguments, _partial_=True, _convert_="all")
            return call if arguments.get("_partial_") and not objects else call(**objects)
        except InstantiationException as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise UsageError(f"{name}: {reason}") from error
        except UsageError as error:
            if (words := str(error).replace("=", " ").split()) and words[0] in arguments:
                raise UsageError(f"{self.key}.{error}") from error  # it names an argument
            raise
        except Exception as error:  # of an argument, or of the machine
            is_plain = type(error) in (RuntimeError, NotImplementedError)
            is_of_machine = isinstance(error, RuntimeError | OSError) and not is_plain
            if is_of_machine or is_out_of_memory(error):
                raise
            reason = summarize_error(error)
            if isinstance(error, TypeError) and str(error).startswith(target.__name__):
                reason += f"; its arguments are {', '.join(inspect.signature(target).parameters)}"
            raise UsageError(f"{name}: {reason}") from error


def read_factory(config: Config, key: str) -> Factory:
    """Read a node with a `_target_`; nothing is built."""
    node: Any = OmegaConf.select(config, key)
    unresolved: Any = OmegaConf.to_container(node, resolve=False)
    if "_target_" not in unresolved:
        raise UsageError(f"{key} must have a _target_: the class to build")
    references = {
        name: value[2:-1]
        for name, value in unresolved.items()
        if isinstance(value, str) and re.fullmatch(r"\$\{[\w.]+\}", value)
    }
    return Factory(key, to_plain(node), references)


def read_factories(config: Config, key: str) -> dict[str, Factory]:
    """Read a node whose entries have a `_target_` each; entries of null are left out."""
    node = OmegaConf.select(config, key, default=OmegaConf.create())
    if not isinstance(node, DictConfig) or "_target_" in node:
        raise UsageError(f"{key} must have names below it, and a _target_ below each of them")
    names = [str(name) for name in node if node[name] is not None]
    return {name: read_factory(config, f"{key}.{name}") for name in names}


def read_option(group: str, name: str) -> Factory:
    """Read an option of a group as it is without the command line."""
    node = OmegaConf.load(get_config_dir() / group / f"{name}.yaml")
    if "defaults" in node or "${" in OmegaConf.to_yaml(node):  # it needs other files
        return read_factory(compose_config([f"{group}={name}"], "train").config, group)
    return Factory(group, to_plain(node))


def check_saved_config(values: Any, key: str, allow_targets: Sequence[str]) -> None:
    """Refuse a part of a saved config that would run other code than that of networks."""
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        path = f"{key}.{name}"
        if name == "_target_":
            _check_target(path, value, allow_targets)
            if not _is_inside(value, allow_targets):
                _check_sources(key, values)
        elif isinstance(value, dict | list | tuple):
            check_saved_config(value, path, allow_targets)
        elif isinstance(value, str) and "${" in value:  # Hydra would resolve it to anything
            raise UsageError(f"{path} is {value[:80]!r}: it must not hold ${{")


def _check_target(key: str, name: Any, allow_targets: Sequence[str]) -> None:
    """Refuse a name outside of the packages, which is not even imported.

    `torch.nn.modules.conv.torch.hub.load` starts like an allowed name: where a class is defined
    counts, too.
    """
    described = str(name)
    if isinstance(name, str) and _is_inside(name, (*NETWORKS, *allow_targets)):
        target = import_target(key, name)
        home = getattr(target, "__module__", None) or "nowhere"
        is_ours = inspect.isclass(target) and _is_inside(home, NETWORKS)
        is_callable = inspect.isclass(target) or inspect.isfunction(target)
        if is_ours or (is_callable and _is_inside(home, allow_targets)):
            return
        described = f"{name} (defined in {home})"
    raise UsageError(
        f"{key} names {described}: a file may only name classes of {', '.join(NETWORKS)}; "
        "allow_targets=[my_package] adds a package that you trust"
    )


def _check_sources(key: str, values: Mapping[str, Any]) -> None:
    """Refuse arguments, also by default, with which a network fetches weights or reads a file."""
    signature = inspect.signature(import_target(key, values["_target_"]))
    given = {name: value for name, value in values.items() if not name.startswith("_")}
    try:
        call = signature.bind_partial(*values.get("_args_", ()), **given)
    except TypeError:  # building it says what is wrong
        return
    call.apply_defaults()
    for name, value in (call.arguments | call.arguments.get("kwargs", {})).items():
        if ("pretrained" in name and value) or (isinstance(value, str) and SOURCES.search(name)):
            raise UsageError(
                f"{key}.{name} is {value!r}: a file may not name what its network fetches or "
                f"reads; allow_targets=[{values['_target_']}] allows it, if you trust the file"
            )


def _is_inside(name: str, packages: Sequence[str]) -> bool:
    """Return whether a dotted name is one of the packages or lies in one."""
    return f"{name}.".startswith(tuple(f"{package}." for package in packages))


def import_target(key: str, name: Any) -> Any:
    """Return what a `_target_` names."""
    try:
        return resolve_name(name)
    except Exception as error:  # a module may raise anything when it is imported
        raise UsageError(f"{key}: cannot import {name}: {summarize_error(error)}") from error
