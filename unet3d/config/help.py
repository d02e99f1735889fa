"""`unet3d COMMAND --help`: every option and key with its comment from the config files."""

import shutil
import textwrap
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from unet3d.config.comments import collect_keys, iter_key_values, list_option_help
from unet3d.config.compose import (
    compose_config,
    get_config_dir,
    list_config_groups,
    make_search_path,
)

FOOTER = """--cfg job prints the composed config; debug=true shows tracebacks
in zsh, quote words with brackets: 'data.patch_size=[64,64,64]'"""

RUN_FOOTER = """hydra.run.dir=FOLDER sets the run folder
-m key=a,b: one run per value, and one per combination of several such lists
YAML files in ./conf/GROUP/ add options to that group"""

POSITIONAL = {"compare": ["RUN ..."], "view": ["IMAGE [LABELS ...]"]}
"""The words without a key that a command takes."""

READS = {"check": ("data", "experiment", "debug")}
"""The config groups and keys of train that a command reads, if it does not read all."""


def format_command_help(
    command: str, about: str, overrides: Sequence[str], user_dirs: Sequence[Path]
) -> str:
    """Return the command's own keys, then what it takes of train, as these overrides make them."""
    composed = compose_config([*overrides, *make_search_path(user_dirs)], command)
    config_dirs = [get_config_dir(), *user_dirs]
    known = collect_keys(composed.composition, config_dirs)
    width = min(shutil.get_terminal_size((100, 0)).columns, 120)
    command_config = yaml.safe_load((get_config_dir() / f"{command}.yaml").read_text("utf-8"))
    extends_train = "train" in command_config["defaults"]
    groups = list_config_groups()
    choices = {g: o for g, o in sorted(composed.composition.choices.items()) if g in groups}

    def format_options(names: Sequence[str]) -> str:
        rows = [row for name in names for row in list_option_help(name, choices[name], config_dirs)]
        return "config groups: group=option (* = selected)\n" + wrap_two_columns(rows, width)

    def format_keys(names: Container[str], heading: str) -> str:
        pairs = iter_key_values(composed.config)
        keys = [(key, value) for key, value in pairs if key.split(".")[0] in names]
        keys.sort(key=lambda pair: (pair[1] != "...", pair[0].split(".")[0] not in command_config))
        rows = [(f"{k}={v}", known[k].comment if k in known else "") for k, v in keys]
        return f"{heading}\n{wrap_two_columns(rows, width)}"

    keys_heading = "keys: key=value (... = required)"
    parts = [format_usage(command, command_config), about]
    if command == "train":
        parts += [format_options(list(choices)), format_keys(composed.config, keys_heading)]
    else:
        parts.append(format_keys([*command_config], keys_heading))
    if command in READS:
        read = READS[command]
        parts.append(format_options([name for name in choices if name in read]))
        parts.append(format_keys(read, "keys of unet3d train that it reads (... = required)"))
    elif extends_train:
        selected = " ".join(f"{group}={option}" for group, option in choices.items())
        parts.append(
            "every option and key of unet3d train is accepted, too (unet3d train --help)\n"
            + textwrap.fill(f"config groups: {selected}", width, break_on_hyphens=False)
        )
    parts.append(f"{RUN_FOOTER}\n{FOOTER}" if command == "train" else FOOTER)
    return "\n\n".join(parts)


def format_usage(command: str, command_config: Mapping[str, Any]) -> str:
    """Return the usage line with the keys that the command requires.

    >>> format_usage("export", {"checkpoint": "???", "format": "onnx"})
    'usage: unet3d export checkpoint=... [key=value ...]'
    """
    required = [f"{key}=..." for key, value in command_config.items() if value == "???"]
    required = POSITIONAL.get(command, required)
    return " ".join(["usage: unet3d", command, *required, "[key=value ...]"])


def wrap_two_columns(rows: Sequence[tuple[str, str]], width: int) -> str:
    """Format two columns and wrap the second; a long name gets a line of its own."""
    left = min(max(len(name) for name, _ in rows), 38)
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(width - left - 4, 30)) or [""]
        if len(name) > left:
            lines += [f"  {name}", *(f"  {'':{left}}  {line}" for line in wrapped if line)]
            continue
        lines.append(f"  {name:{left}}  {wrapped[0]}".rstrip())
        lines += [f"  {'':{left}}  {line}" for line in wrapped[1:]]
    return "\n".join(lines)
