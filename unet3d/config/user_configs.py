"""What options that somebody wrote may not do, seen before Hydra reads them."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from unet3d.errors import UsageError

MOST_VALUES = 10_000
"""Of a file, each alias counted with all that it stands for."""

HYDRA_KEYS = ("run", "sweep")
"""The folders of runs. Others make Hydra set variables or call code before any of ours runs."""


def check_user_configs(folder: Path, words: Sequence[str]) -> None:
    """Refuse what the options that are named, and those that they name, would do.

    The verbs' configs, which are ours, lie in no group's folder.
    """
    names = {name for word in words for name in list_option_names(word.partition("=")[2])}
    files, seen = sorted(folder.glob("*/**/*.yaml")), set[Path]()
    while new := [file for file in files if file.stem in names and file not in seen]:
        for file in new:
            seen.add(file)
            names.update(check_file(file))


def list_option_names(text: str) -> list[str]:
    """The names in a value, a sweep's too.

    >>> list_option_names("mine/large,small")
    ['large', 'small']
    """
    parts = re.split(r"[,\s\[\]'\"]+", text)
    return [part.rpartition("/")[2].removesuffix(".yaml") for part in parts if part]


def check_file(file: Path) -> Iterator[str]:
    """The options that a file names in turn; Misuse if it may not be read."""
    text = read_config_text(file)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        count = count_expanded_values(node, {})
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{file} cannot be read as YAML: {reason}") from None
    if count > MOST_VALUES:
        raise UsageError(f"{file}: its aliases unfold to more than {MOST_VALUES:,} values")
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{file} must hold keys with values, as in data: {{batch_size: 2}}")
    package = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
    reaching = [package[1]] if package else []
    for key, value in iter_pairs(node):
        if key == "hydra":
            reaching += [f"hydra.{k}" for k, _ in iter_pairs(value) if k not in HYDRA_KEYS]
            reaching += [] if isinstance(value, yaml.MappingNode) else ["hydra"]
        if key == "defaults":
            words = [n.value for n in iter_scalars(value)]
            reaching += [word for word in words if "hydra" in word]
            plain = value.value if isinstance(value, yaml.SequenceNode) else []
            if any(getattr(entry, "value", None) == file.stem for entry in plain):
                raise UsageError(f"{file} names itself in its defaults")
            yield from (name for word in words for name in list_option_names(word))
    for what in reaching:
        if "hydra" in what:
            raise UsageError(
                f"{file} sets {what}: a config may set hydra.run and hydra.sweep, the rest is for "
                "the command line"
            )


def read_config_text(file: Path) -> str:
    """Its text."""
    try:
        return file.read_text()
    except ValueError as error:
        raise UsageError(f"{file} is no text: {error}") from None


def count_expanded_values(node: Any, known: dict[int, int | None]) -> int:
    """How many values a node stands for; a shared node counts wherever it is named."""
    found = known.get(id(node), -1)
    if found is None:
        raise yaml.YAMLError("an alias stands for something that it is part of")
    if found >= 0:
        return found
    known[id(node)] = None
    below = node.value if isinstance(node, yaml.CollectionNode) else []
    parts = [p for part in below for p in (part if isinstance(part, tuple) else (part,))]
    known[id(node)] = total = 1 + sum(count_expanded_values(part, known) for part in parts)
    return total


def iter_pairs(node: Any) -> list[tuple[str, Any]]:
    """Keys and values of a node that has them."""
    found = node.value if isinstance(node, yaml.MappingNode) else []
    return [(str(key.value), value) for key, value in found]


def iter_scalars(node: Any) -> Iterator[Any]:
    """The single values at any depth, keys too."""
    if isinstance(node, yaml.ScalarNode):
        yield node
    for part in node.value if isinstance(node, yaml.CollectionNode) else ():
        for inner in part if isinstance(part, tuple) else (part,):
            yield from iter_scalars(inner)
