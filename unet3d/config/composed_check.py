"""Check a composed config before anything of it is used: what it refers to, and what it names.

Whatever the files look like, this is what runs. Only the command line grants trust.
"""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unet3d.config.allowed_targets import (
    check_name,
    iter_targets,
    read_allowed_packages,
)
from unet3d.config.values import MAX_VALUES, KeyPath, iter_texts
from unet3d.errors import UsageError

MAX_DEPTH = 50
"""How deep values may be nested, also by references."""

RESOLVERS = ("now", "hydra")
"""What `${name:...}` may call. Others read the environment, or make values out of text."""

REFERENCE = re.compile(
    r"\$\{\s*(\.*[\w\[\].@/-]+)\s*\}|\$\{\s*(?:" + "|".join(RESOLVERS) + r"):[^${}]*\}"
)
TOO_DEEP = f"is more than {MAX_DEPTH} values deep"

CHARACTERS = 100
"""Characters of a text that count as a value."""


def check_composed(config: DictConfig) -> None:
    """Refuse a config that calls resolvers, grows beyond bounds, or names other code."""
    try:
        content: Any = OmegaConf.to_container(config, resolve=False)
    except RecursionError:
        raise UsageError(f"a value {TOO_DEEP}") from None
    content = {key: value for key, value in content.items() if key != "hydra"}
    for path, text in iter_texts(content):
        if "${" in REFERENCE.sub("", text):
            raise UsageError(
                f"{'.'.join(map(str, path))} is {text[:80]!r}: a value may refer to another one, "
                "as in ${data.root}, or use ${now:...} and ${hydra:...}; write other values out"
            )
    try:
        References(content).measure(())
    except RecursionError:
        raise UsageError(f"a chain of references {TOO_DEEP}") from None
    packages = read_allowed_packages(config)
    for key, name in iter_targets(content, ""):
        if isinstance(name, str) and "${" in name:
            name = _select(config, key)
        if name != "auto":  # of checkpointing=auto; a strategy replaces it
            check_name(key, name, packages)


def _select(config: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException as error:
        raise UsageError(f"{key}: {' '.join(str(error).split())}") from error


class References:
    """How large values are once the references in them are replaced by what they refer to."""

    def __init__(self, content: Mapping[str, Any]):
        self.content = content
        self.sizes: dict[KeyPath, tuple[int, int] | None] = {}  # None while it is measured

    def measure(self, path: KeyPath) -> tuple[int, int]:
        """Return the number of values at a path, and how deep they are; refuse too many, loops."""
        where = ".".join(map(str, path)) or "the config"
        known = self.sizes.get(path, (0, 0))
        if known is None or len(path) > MAX_DEPTH:
            raise UsageError(f"{where} {'refers to itself' if known is None else TOO_DEEP}")
        if known[0]:
            return known
        self.sizes[path] = None
        value, size, depth = self.get(path), 1, 0
        parts: list[KeyPath] = []
        if isinstance(value, str):
            size += len(value) // CHARACTERS
            found = [self.find(path, match[1]) for match in REFERENCE.finditer(value)]
            parts = [part for part in found if part is not None]
        elif isinstance(value, dict | list):
            keys = value if isinstance(value, dict) else range(len(value))
            parts = [(*path, key) for key in keys]
        for part in parts:
            inner, below = self.measure(part)
            size, depth = size + inner, max(depth, below + 1)
        if size > MAX_VALUES:
            raise UsageError(f"{where} expands to more than {MAX_VALUES:,} values")
        if depth > MAX_DEPTH:
            raise UsageError(f"{where} {TOO_DEEP}")
        self.sizes[path] = size, depth
        return size, depth

    def get(self, path: KeyPath) -> Any:
        """Return a value as it is written."""
        value: Any = self.content
        for key in path:
            value = value[key]
        return value

    def find(self, path: KeyPath, reference: str | None, hops: int = 0) -> KeyPath | None:
        """Return the path of what a value at a path refers to; None if there is nothing."""
        if reference is None or hops > MAX_DEPTH:
            return None
        dots = len(reference) - len(reference.lstrip("."))
        target = path[:-dots] if dots else ()
        for key in re.findall(r"[^.\[\]]+", reference):
            value = self.get(target)
            while isinstance(value, str) and hops <= MAX_DEPTH:  # a reference to a mapping
                match = REFERENCE.fullmatch(value)
                hop = self.find(target, match[1], hops + 1) if match else None
                if hop is None:
                    return None
                target, value, hops = hop, self.get(hop), hops + 1
            if isinstance(value, list) and not re.fullmatch("[0-9]+", key):  # -1 or 1_0, too
                raise UsageError(f"${{{reference}}}: {key} is not the index of a list")
            if isinstance(value, list) and int(key) < len(value):
                target = (*target, int(key))
            elif isinstance(value, dict) and (key in value or key.isdecimal()):
                if key not in value and int(key) not in value:
                    return None
                target = (*target, key if key in value else int(key))
            else:
                return None
        return target
