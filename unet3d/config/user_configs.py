"""Refuse config files that would fill memory when they are read, before they are."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from unet3d.config.values import MAX_VALUES
from unet3d.errors import UsageError
from unet3d.json_file import read_text

MAX_BYTES = 2**16


def check_file(file: Path) -> None:
    """Refuse a file that would fill memory, or is not text."""
    text = read_config_text(file)
    if "\0" in text:
        raise UsageError(f"{file} is not a text file: it has a NUL byte")
    check_aliases(file, text)


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file; refuse one that would fill memory."""
    text = read_config_text(file)
    check_aliases(file, text)
    with describe_yaml_errors(file):
        return yaml.safe_load(text)


def check_aliases(file: Path, text: str) -> None:
    """Refuse YAML whose aliases expand to too many values."""
    if ("&" not in text or "*" not in text) and len(text) <= MAX_VALUES:
        return  # too few for more than MAX_VALUES: it is not parsed twice
    with describe_yaml_errors(file):
        count = count_expanded_values(yaml.compose(text, Loader=yaml.SafeLoader), {})
    if count > MAX_VALUES:
        raise UsageError(f"{file}: its aliases expand to more than {MAX_VALUES:,} values")


@contextmanager
def describe_yaml_errors(file: Path) -> Generator[None]:
    """Name the file in errors of PyYAML, which raises a ValueError at dates that there are not."""
    try:
        yield
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{file} cannot be read as YAML: {reason}") from None


def read_config_text(file: Path) -> str:
    """Return a file's text."""
    try:
        return read_text(file, MAX_BYTES)
    except UnicodeError as error:
        raise UsageError(f"{file} is not a text file: {error}") from None
    except ValueError as error:
        raise UsageError(f"{file} is not a config file: {error}") from None


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
