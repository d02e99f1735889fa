"""`unet3d VERB --help`: every option and key with the words that its file says of it."""

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from unet3d.build.request import Request, composed, conf_folder
from unet3d.commands.own_configs import check_own
from unet3d.commands.run import answered, given_folders, own_folders, quoted

INTERNAL = ("_target_", "_partial_")
"""Keys that say which code runs: for whoever writes options, not for whoever chooses them."""

FOOT = "--cfg job prints the config that a command line makes; debug=true shows tracebacks"

RUNS = """hydra.run.dir=FOLDER names the run's folder; -m runs every combination of key=a,b
a folder conf/ beside you adds options"""


def show(verb: str, about: str, words: Sequence[str]) -> int:
    """Print it, for the config that the words make."""

    def compose_and_print() -> int:
        own = own_folders(words)
        for folder in {conf_folder(), *own}:
            check_own(folder, words)
        taken = {str(folder) for folder in given_folders(words)}
        typed = [quoted(w, sweep=False) for w in words if w[0] != "-" and w not in taken]
        print(help_text(verb, about, typed, own))
        return 0

    return answered(compose_and_print, debug=False, config=verb, words=words)


def help_text(verb: str, about: str, words: Sequence[str], own: Sequence[Path]) -> str:
    """The options, then the keys as these words make them; `own` are folders of the user's."""
    # Quoted: a path may hold what Hydra's grammar reads as something else.
    places = [f"file://{folder.resolve()}".replace("'", "\\'") for folder in own]
    search = ["hydra.searchpath=[" + ",".join(f"'{p}'" for p in places) + "]"] if own else []
    request = composed([*words, *search], verb)
    folders = [conf_folder(), *own]
    said = comments(verb, request, folders)
    width = min(shutil.get_terminal_size((100, 0)).columns, 120)
    parts = [f"usage: unet3d {verb} [key=value ...]", about]
    chosen = [group for group in request.choices if (conf_folder() / group).is_dir()]
    if chosen:
        rows = [row for group in sorted(chosen) for row in options(group, request, folders)]
        parts.append("options (* is taken)\n" + columns(rows, width))
    mine = yaml.safe_load((conf_folder() / f"{verb}.yaml").read_text())
    keys = sorted(flat(request.config), key=lambda row: row[0].split(".")[0] not in mine)
    rows = [(f"{key}={value}", said.get(key, "")) for key, value in keys]
    parts.append("keys (... must be given)\n" + columns(rows, width))
    return "\n\n".join([*parts, f"{RUNS}\n{FOOT}" if verb == "train" else FOOT])


def options(group: str, request: Request, folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """What a group offers, and the first line of each."""
    files = {f.stem: f for folder in folders for f in sorted((folder / group).glob("[!_]*.yaml"))}
    for name, file in files.items():
        star = "*" if request.choices[group] == name else " "
        lines = [line for line in file.read_text().splitlines() if not line.startswith("# @")]
        yield f"{star} {group}={name}", lines[0].lstrip("# ") if lines[0].startswith("#") else ""


def columns(rows: Sequence[tuple[str, str]], width: int) -> str:
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


def flat(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys with dots and their values, as a command line would have them.

    What follows another key is left out.

    >>> list(flat(OmegaConf.create({"a": {"b": [1, None], "c": "???", "_target_": "x"}})))
    [('a.b', '[1,null]'), ('a.c', '...')]
    """
    for key, value in OmegaConf.to_container(config, resolve=False).items():  # type: ignore
        name = f"{prefix}{key}"
        if key in INTERNAL or (isinstance(value, str) and value.startswith("${")):
            continue
        if isinstance(value, dict) and value:
            node = OmegaConf.create(value)
            assert isinstance(node, DictConfig)
            yield from flat(node, f"{name}.")
        else:
            yield name, "..." if value == "???" else written(value)


def written(value: Any) -> str:
    """A value as YAML and the command line have it.

    >>> written(True), written(None), written([1, 0.5]), written({"a": 1}), written("")
    ('true', 'null', '[1,0.5]', '{a:1}', "''")
    """
    if isinstance(value, list | ListConfig):
        return f"[{','.join(written(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{written(v)}' for k, v in value.items())}}}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value) or "''"


def comments(verb: str, request: Request, folders: Sequence[Path]) -> dict[str, str]:
    """What the files behind a config say of each key; the last file to say something is heard."""
    found: dict[str, str] = {}
    for name in (f for f in ("train", verb) if (conf_folder() / f"{f}.yaml").exists()):
        if name == verb or "train" in defaults(conf_folder() / f"{verb}.yaml"):
            found |= commented(conf_folder() / f"{name}.yaml", "")
    for group, option in request.choices.items():
        for file in chain(group, str(option), folders):
            found |= commented(file, f"{group}.")
    return found


def chain(group: str, option: str, folders: Sequence[Path]) -> Iterator[Path]:
    """An option's file, after those that it builds on."""
    files = [folder / group / f"{option}.yaml" for folder in folders]
    file = next((f for f in reversed(files) if f.is_file()), None)
    if file is not None:
        for name in defaults(file):
            if name not in ("_self_", option):
                yield from chain(group, name, folders)
        yield file


def defaults(file: Path) -> list[str]:
    """The plain names in a file's defaults."""
    content = yaml.safe_load(file.read_text())
    listed = content.get("defaults", []) if isinstance(content, dict) else []
    return [name for name in listed if isinstance(name, str)]


def commented(file: Path, prefix: str) -> dict[str, str]:
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
