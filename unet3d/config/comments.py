"""The comments of config files: they are the help of options and keys."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf

from unet3d.config.compose import Composition, get_config_dir, split_options, to_yaml_literal

INTERNAL_KEYS = ("_target_", "_partial_")
"""Keys that select code: for authors of options, not for their users."""


def list_option_help(
    group: str, choice: str, config_dirs: Sequence[Path]
) -> Iterator[tuple[str, str]]:
    """Yield a group's options, the selected one with a star, and the first comment of each."""
    paths = (p for d in config_dirs for p in sorted((d / group).glob("[!_]*.yaml")))
    for name, path in {path.stem: path for path in paths}.items():
        star = "*" if name in split_options(choice) else " "
        lines = path.read_text("utf-8").splitlines()
        first = next((line for line in lines if not line.startswith("# @")), "")
        yield f"{star} {group}={name}", first.lstrip("# ") if first.startswith("#") else ""


def iter_key_values(
    config: DictConfig | dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield keys with dots and their values, as a command line has them.

    Keys that follow another key are left out.

    >>> config = OmegaConf.create({"a": {"b": [1, None], "c": "???", "_target_": "x"}})
    >>> list(iter_key_values(config))
    [('a.b', '[1,null]'), ('a.c', '...')]
    """
    plain: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
    for key, value in plain.items():
        name = f"{prefix}{key}"
        if key in INTERNAL_KEYS or (isinstance(value, str) and value.startswith("${")):
            continue
        if isinstance(value, dict) and value:
            yield from iter_key_values(value, f"{name}.")
        else:
            yield name, "..." if value == "???" else to_yaml_literal(value)


class KnownKey(NamedTuple):
    """A key of the config files: the value that it has there, and the comment behind it."""

    value: Any
    comment: str


def collect_keys(composition: Composition, config_dirs: Sequence[Path]) -> dict[str, KnownKey]:
    """Return the keys of a command and of its options.

    Of several files that have a key, the last value and the last comment win.
    """
    command = composition.command
    command_file = get_config_dir() / f"{command}.yaml"
    keys: dict[str, KnownKey] = {}

    def add(path: Path, prefix: str = "") -> None:
        for name, key in read_keys(path, prefix).items():
            keys[name] = (
                key if key.comment or name not in keys else keys[name]._replace(value=key.value)
            )

    if command != "train" and "train" in _read_defaults(command_file):
        add(get_config_dir() / "train.yaml")
    add(command_file)
    for group, option in composition.choices.items():
        if group == "experiment":  # it sets keys of others
            continue
        keys.setdefault(group, KnownKey({}, ""))
        for name in split_options(str(option)):
            for path in list_parent_files(group, name, config_dirs):
                add(path, f"{group}.")
    return keys


def list_parent_files(group: str, option: str, config_dirs: Sequence[Path]) -> Iterator[Path]:
    """Yield an option's file, after the files that it extends."""
    paths = [folder / group / f"{option}.yaml" for folder in config_dirs]
    path = next((p for p in reversed(paths) if p.is_file()), None)
    if path is not None:
        for name in _read_defaults(path):
            if name.startswith("/"):
                other, _, name = name.strip("/").rpartition("/")
                yield from list_parent_files(other, name, config_dirs)
            elif name not in ("_self_", option):
                yield from list_parent_files(group, name, config_dirs)
        yield path


def read_keys(path: Path, prefix: str = "") -> dict[str, KnownKey]:
    """Return the keys of a file."""
    text = path.read_text("utf-8")
    lines, loader = text.splitlines(), yaml.SafeLoader(text)
    keys: dict[str, KnownKey] = {}

    def visit(node: yaml.Node | None, prefix: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            comment = re.search(r"\s#\s*(.+)$", lines[key.start_mark.line])
            plain = loader.construct_object(value, deep=True)
            keys[f"{prefix}{key.value}"] = KnownKey(plain, comment[1] if comment else "")
            visit(value, f"{prefix}{key.value}.")

    visit(loader.get_single_node(), prefix)
    return keys


def _read_defaults(path: Path) -> list[str]:
    content = yaml.safe_load(path.read_text("utf-8"))
    defaults = content.get("defaults", []) if isinstance(content, dict) else []
    return [name for name in defaults if isinstance(name, str)]
