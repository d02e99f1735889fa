"""Call what a `_target_` names: the one place where configs become code."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from unet3d.config.allowed_targets import (
    check_targets,
    is_inside,
    read_allowed_packages,
    resolve_target,
)
from unet3d.config.argument_types import match_argument_types
from unet3d.config.constructors import CONFIGURED, Constructors
from unet3d.config.values import iter_texts, to_plain
from unet3d.errors import UsageError, lacks_memory, summarize_error

ARGUMENT_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError),
    *(LookupError, NotImplementedError, TypeError, ValueError),
)
"""What classes raise at arguments that they do not take."""


def refuse_references(values: Any, key: str) -> None:
    """Refuse text that Hydra would resolve when it builds an object.

    References are resolved by now; what is left came out of one, or from a checkpoint, and could
    name any code.
    """
    for path, text in iter_texts(values):
        if "${" in text:
            name = ".".join(map(str, (key, *path)))
            raise UsageError(f"{name} is {text[:80]!r}: it must not hold ${{")


def refuses_argument(error: Exception) -> bool:
    """Return whether torch itself refuses an argument; others lack memory, or say what they do."""
    return type(error) is RuntimeError and not lacks_memory(error)


@dataclass(frozen=True)
class Factory:
    """A `_target_` and its arguments; a call builds the object."""

    key: str  # where the config has it
    arguments: Mapping[str, Any]  # plain values, with `_target_`
    allowed_packages: Sequence[str] = field(default=(), repr=False)
    references: Mapping[str, str] = field(default_factory=dict)  # arguments that follow a key
    allowed: Constructors = field(
        default_factory=lambda: CONFIGURED, repr=False
    )  # what targets may name besides

    @property
    def target(self) -> Any:
        """Return the class or function that is called."""
        if "_target_" not in self.arguments:
            raise UsageError(f"{self.key} must have a _target_: the class to build")
        name = self.arguments["_target_"]
        lists = {"user_packages": self.allowed_packages, "allowed": self.allowed}
        return resolve_target(f"{self.key}._target_", name, **lists)

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
        target = self.target  # refuse a missing one
        refuse_references(self.arguments, self.key)
        check_targets(self.arguments, self.key, self.allowed_packages, self.allowed)
        arguments = {name: v for name, v in self.arguments.items() if name not in objects}
        if not is_inside(arguments["_target_"], self.allowed_packages):
            arguments = match_argument_types(target, arguments, self.key)
        name = f"{self.key} (_target_: {self.arguments['_target_']})"
        is_partial = self.arguments.get("_partial_", False)
        try:
            call = hydra.utils.instantiate(arguments, _partial_=True, _convert_="all")
            return call if is_partial and not objects else call(**objects)
        except InstantiationException as error:
            raise UsageError(f"{name}: {summarize_error(error.__cause__ or error)}") from error
        except UsageError as error:
            if (words := str(error).replace("=", " ").split()) and words[0] in arguments:
                raise UsageError(f"{self.key}.{error}") from error  # it names an argument
            raise
        except (*ARGUMENT_ERRORS, RuntimeError) as error:
            if not isinstance(error, ARGUMENT_ERRORS) and not refuses_argument(error):
                raise
            raise UsageError(f"{name}: {summarize_error(error)}") from error


def read_factory(config: DictConfig, key: str) -> Factory:
    """Read a node with a `_target_`; nothing is built."""
    node = _select(config, key)
    unresolved: Any = OmegaConf.to_container(node, resolve=False)
    if "_target_" not in unresolved:
        raise UsageError(f"{key} must have a _target_: the class to build")
    references = {
        name: value[2:-1]
        for name, value in unresolved.items()
        if isinstance(value, str) and re.fullmatch(r"\$\{[\w.]+\}", value)
    }
    return Factory(key, to_plain(node), read_allowed_packages(config), references)


def read_factories(config: DictConfig, key: str) -> dict[str, Factory]:
    """Read a node whose entries have a `_target_` each; entries of null are left out."""
    node = OmegaConf.select(config, key, default=OmegaConf.create())
    if not isinstance(node, DictConfig) or "_target_" in node:
        raise UsageError(f"{key} must have names below it, and a _target_ below each of them")
    names = [str(name) for name in node if node[name] is not None]
    return {name: read_factory(config, f"{key}.{name}") for name in names}


def _select(config: DictConfig, key: str) -> DictConfig:
    node = config
    for part in key.split("."):
        node = node[part]
    return node
