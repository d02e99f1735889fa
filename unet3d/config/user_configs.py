"""Check the user's own config files before Hydra reads them: some could run code or fill memory."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from unet3d.config.compose import get_config_dir
from unet3d.errors import UsageError

MAX_VALUES = 10_000
"""Values in a file, counting what an alias stands for wherever it is used."""

ALLOWED_HYDRA_KEYS = ("run", "sweep")
"""The folders of runs. Other keys make Hydra set variables or call code before ours runs."""


def find_local_config_dir() -> list[Path]:
    """Return conf/ in the working folder, if it is there and is not ours."""
    local = Path.cwd() / "conf"
    return [local] if local.is_dir() and local != get_config_dir() else []


def check_config_dirs(user_dirs: Sequence[Path], args: Sequence[str]) -> None:
    """Check the user's folders and ours, to which users of a checkout add options."""
    for folder in {get_config_dir(), *user_dirs}:
        check_user_configs(folder, args)


def check_user_configs(folder: Path, args: Sequence[str]) -> None:
    """Check the options in a folder that the command line selects, and those that they select.

    The configs of commands are ours: they are in no group's folder.
    """
    names = {name for arg in args for name in list_option_names(arg.partition("=")[2])}
    files, checked = sorted(folder.glob("*/**/*.yaml")), set[Path]()
    while new := [file for file in files if file.stem in names and file not in checked]:
        for file in new:
            checked.add(file)
            names.update(check_file(file))


def list_option_names(text: str) -> list[str]:
    """List the option names in a value, which may be a sweep.

    >>> list_option_names("mine/large,small")
    ['large', 'small']
    """
    parts = re.split(r"[,\s\[\]'\"]+", text)
    return [part.rpartition("/")[2].removesuffix(".yaml") for part in parts if part]


def check_file(file: Path) -> Iterator[str]:
    """Refuse a file that Hydra must not read; yield the options that it selects."""
    text, node = read_yaml_nodes(file)
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{file} must hold keys with values, as in data: {{batch_size: 2}}")
    package = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
    settings = [package[1]] if package else []
    for key, value in list_pairs(node):
        if key == "hydra":
            settings += [f"hydra.{k}" for k, _ in list_pairs(value) if k not in ALLOWED_HYDRA_KEYS]
            settings += [] if isinstance(value, yaml.MappingNode) else ["hydra"]
        if key == "defaults":
            values = [scalar.value for scalar in iter_scalars(value)]
            settings += [text for text in values if "hydra" in text]
            entries = value.value if isinstance(value, yaml.SequenceNode) else []
            if any(getattr(entry, "value", None) == file.stem for entry in entries):
                raise UsageError(f"{file} lists itself in its defaults")
            yield from (name for text in values for name in list_option_names(text))
    for setting in settings:
        if "hydra" in setting:
            raise UsageError(
                f"{file} sets {setting}: a config may set hydra.run and hydra.sweep; set the rest "
                "on the command line"
            )


def read_yaml_nodes(file: Path) -> tuple[str, Any]:
    """Return a file's text and its YAML nodes; refuse one that would fill memory."""
    text = read_config_text(file)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        count = count_expanded_values(node, {})
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{file} cannot be read as YAML: {reason}") from None
    if count > MAX_VALUES:
        raise UsageError(f"{file}: its aliases expand to more than {MAX_VALUES:,} values")
    return text, node


def read_config_text(file: Path) -> str:
    """Return a file's text."""
    try:
        return file.read_text("utf-8")
    except ValueError as error:
        raise UsageError(f"{file} is not a text file: {error}") from None


def count_expanded_values(node: Any, counts: dict[int, int | None]) -> int:
    """Count the values of a node, with those of its aliases; `counts` holds the nodes so far."""
    count = counts.get(id(node), -1)
    if count is None:
        raise yaml.YAMLError("an alias refers to a value that contains it")
    if count >= 0:
        return count
    counts[id(node)] = None
    content = node.value if isinstance(node, yaml.CollectionNode) else []
    parts = [p for part in content for p in (part if isinstance(part, tuple) else (part,))]
    counts[id(node)] = total = 1 + sum(count_expanded_values(part, counts) for part in parts)
    return total


def list_pairs(node: Any) -> list[tuple[str, Any]]:
    """Return the keys and values of a mapping; nothing of another node."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return [(str(key.value), value) for key, value in pairs]


def iter_scalars(node: Any) -> Iterator[Any]:
    """Yield the scalars at any depth, keys too."""
    if isinstance(node, yaml.ScalarNode):
        yield node
    for part in node.value if isinstance(node, yaml.CollectionNode) else ():
        for inner in part if isinstance(part, tuple) else (part,):
            yield from iter_scalars(inner)
