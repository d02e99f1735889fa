"""`unet3d VERB --help`: every option and key with the words that its file says of it."""

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from unet3d.cli.app import (
    find_user_config_dirs,
    parse_config_dirs,
    quote_override,
    run_with_error_handling,
)
from unet3d.config.compose import ComposedConfig, compose_config, get_config_dir
from unet3d.config.user_configs import check_user_configs

INTERNAL = ("_target_", "_partial_")
"""Keys that say which code runs: for whoever writes options, not for whoever chooses them."""

FOOT = "--cfg job prints the config that a command line makes; debug=true shows tracebacks"

RUNS = """hydra.run.dir=FOLDER names the run's folder; -m runs every combination of key=a,b
a folder conf/ beside you adds options"""


def print_help(verb: str, about: str, words: Sequence[str]) -> int:
    """Print it, for the config that the words make."""

    def compose_and_print() -> int:
        own = find_user_config_dirs(words)
        for folder in {get_config_dir(), *own}:
            check_user_configs(folder, words)
        taken = {str(folder) for folder in parse_config_dirs(words)}
        typed = [quote_override(w, sweep=False) for w in words if w[0] != "-" and w not in taken]
        print(format_command_help(verb, about, typed, own))
        return 0

    return run_with_error_handling(compose_and_print, debug=False, config=verb, words=words)


def format_command_help(verb: str, about: str, words: Sequence[str], own: Sequence[Path]) -> str:
    """The options, then the keys as these words make them; `own` are folders of the user's."""
    # Quoted: a path may hold what Hydra's grammar reads as something else.
    places = [f"file://{folder.resolve()}".replace("'", "\\'") for folder in own]
    search = ["hydra.searchpath=[" + ",".join(f"'{p}'" for p in places) + "]"] if own else []
    request = compose_config([*words, *search], verb)
    folders = [get_config_dir(), *own]
    said = collect_comments(verb, request, folders)
    width = min(shutil.get_terminal_size((100, 0)).columns, 120)
    parts = [f"usage: unet3d {verb} [key=value ...]", about]
    chosen = [group for group in request.choices if (get_config_dir() / group).is_dir()]
    if chosen:
        rows = [row for group in sorted(chosen) for row in iter_options(group, request, folders)]
        parts.append("options (* is taken)\n" + wrap_two_columns(rows, width))
    mine = yaml.safe_load((get_config_dir() / f"{verb}.yaml").read_text())
    keys = sorted(iter_key_values(request.config), key=lambda row: row[0].split(".")[0] not in mine)
    rows = [(f"{key}={value}", said.get(key, "")) for key, value in keys]
    parts.append("keys (... must be given)\n" + wrap_two_columns(rows, width))
    return "\n\n".join([*parts, f"{RUNS}\n{FOOT}" if verb == "train" else FOOT])


def iter_options(
    group: str, request: ComposedConfig, folders: Sequence[Path]
) -> Iterator[tuple[str, str]]:
    """What a group offers, and the first line of each."""
    files = {f.stem: f for folder in folders for f in sorted((folder / group).glob("[!_]*.yaml"))}
    for name, file in files.items():
        star = "*" if request.choices[group] == name else " "
        lines = [line for line in file.read_text().splitlines() if not line.startswith("# @")]
        yield f"{star} {group}={name}", lines[0].lstrip("# ") if lines[0].startswith("#") else ""


def wrap_two_columns(rows: Sequence[tuple[str, str]], width: int) -> str:
    """Two of them, the second one wrapped; a word that is too long has a line of its own."""
    left = min(max(len(word) for word, _ in rows), 38)
    lines = []
    for word, said in rows:
        wrapped = textwrap.wrap(said, max(width - left - 4, 30)) or [""]
        if len(word) > left:
            lines += [f"  {word}", *(f"  {'':{left}}  {line}" for line in wrapped if line)]
            continue
        lines.append(f"  {word:{left}}  {wrapped[0]}".rstrip())
        lines += [f"  {'':{left}}  {line}" for line in wrapped[1:]]
    return "\n".join(lines)


def iter_key_values(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys with dots and their values, as a command line would have them.

    What follows another key is left out.

    >>> list(iter_key_values(OmegaConf.create({"a": {"b": [1, None], "c": "???", "_target_": "x"}})))
    [('a.b', '[1,null]'), ('a.c', '...')]
    """
    for key, value in OmegaConf.to_container(config, resolve=False).items():  # type: ignore
        name = f"{prefix}{key}"
        if key in INTERNAL or (isinstance(value, str) and value.startswith("${")):
            continue
        if isinstance(value, dict) and value:
            node = OmegaConf.create(value)
            assert isinstance(node, DictConfig)
            yield from iter_key_values(node, f"{name}.")
        else:
            yield name, "..." if value == "???" else to_yaml_literal(value)


def to_yaml_literal(value: Any) -> str:
    """A value as YAML and the command line have it.

    >>> to_yaml_literal(True), to_yaml_literal(None), to_yaml_literal([1, 0.5]), to_yaml_literal({"a": 1}), to_yaml_literal("")
    ('true', 'null', '[1,0.5]', '{a:1}', "''")
    """
    if isinstance(value, list | ListConfig):
        return f"[{','.join(to_yaml_literal(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{to_yaml_literal(v)}' for k, v in value.items())}}}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value) or "''"


def collect_comments(verb: str, request: ComposedConfig, folders: Sequence[Path]) -> dict[str, str]:
    """What the files behind a config say of each key; the last file to say something is heard."""
    found: dict[str, str] = {}
    for name in (f for f in ("train", verb) if (get_config_dir() / f"{f}.yaml").exists()):
        if name == verb or "train" in defaults(get_config_dir() / f"{verb}.yaml"):
            found |= parse_comments(get_config_dir() / f"{name}.yaml", "")
    for group, option in request.choices.items():
        for file in list_parent_files(group, str(option), folders):
            found |= parse_comments(file, f"{group}.")
    return found


def list_parent_files(group: str, option: str, folders: Sequence[Path]) -> Iterator[Path]:
    """An option's file, after those that it builds on."""
    files = [folder / group / f"{option}.yaml" for folder in folders]
    file = next((f for f in reversed(files) if f.is_file()), None)
    if file is not None:
        for name in defaults(file):
            if name not in ("_self_", option):
                yield from list_parent_files(group, name, folders)
        yield file


def defaults(file: Path) -> list[str]:
    """The plain names in a file's defaults."""
    content = yaml.safe_load(file.read_text())
    listed = content.get("defaults", []) if isinstance(content, dict) else []
    return [name for name in listed if isinstance(name, str)]


def parse_comments(file: Path, prefix: str) -> dict[str, str]:
    """Keys and the comments behind them."""
    lines = file.read_text().splitlines()
    found: dict[str, str] = {}

    def look(node: yaml.Node | None, prefix: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            comment = re.search(r"\s#\s*(.+)$", lines[key.start_mark.line])
            if comment:
                found[f"{prefix}{key.value}"] = comment[1]
            look(value, f"{prefix}{key.value}.")

    look(yaml.compose("\n".join(lines), Loader=yaml.SafeLoader), prefix)
    return found
