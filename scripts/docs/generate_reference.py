"""Generate docs/reference/ from conf/: `python -m scripts.docs.generate_reference`.

conf/ is the single source. The meaning of a key is the comment next to it or above it, an option is
described at the head of its file, and a group next to its line in train.yaml. The exit code is 1 if
a key has no comment.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from unet3d.__main__ import COMMANDS
from unet3d.config.compose import list_config_groups
from unet3d.config.keys import INTERNAL_KEYS, READS

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
FOLDER = ROOT / "docs" / "reference"

COMMANDS_HEAD = """# Commands

Every command is `unet3d COMMAND key=value ...`. This page lists the commands and the keys of each;
config groups are in [Options](options.md). In zsh, quote words with brackets or braces:
`'data.patch_size=[64,64,64]'`.

`unet3d COMMAND --help` prints the same keys with their values, and `unet3d COMMAND ... --cfg job`
the config of a command. This page is generated from the comments in `conf/`
(`python -m scripts.docs.generate_reference`).
"""

OPTIONS_HEAD = """# Options

`group=option` selects an option of a config group, and `key=value` sets a key, in any order. This
page lists all groups, options and keys. It is generated from the comments in `conf/`
(`python -m scripts.docs.generate_reference`).

- The command line overrides an [experiment](#experiment), and an experiment overrides the defaults.
- `null` means no value, `???` means required, `[1,2,3]` is a list, and `${data.root}` takes the
  value of another key.
- `-m key=a,b` starts one run per value, and one per combination of several such lists.
- YAML files in a folder `conf/` of your working folder, in a subfolder for each group, add options.
- A key that does not exist is rejected, and the error names the nearest one.
"""


@dataclass(frozen=True)
class Key:
    """A line of a config file."""

    name: str  # with dots, within its file
    value: str  # as written; empty if nested keys follow
    meaning: str  # its comment


@dataclass(frozen=True)
class ConfigFile:
    """A file of conf/, with its comments."""

    about: list[str]  # the comment at its head, line by line
    bases: list[str]  # files next to it that it starts from
    choices: dict[str, tuple[str, str]]  # group -> option in its defaults, and the comment there
    keys: list[Key]


@cache
def read_config(path: Path) -> ConfigFile:
    """Read the keys with YAML's parser, and comments from the rest of their lines."""
    lines = path.read_text().splitlines()
    head = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    about = [line.removeprefix("#").removeprefix(" ") for line in lines[:head]]
    about = [line for line in about if not line.startswith("@package")]
    top = yaml.compose("\n".join(lines), Loader=yaml.SafeLoader)
    bases, choices, keys = [], {}, []
    for key, value in top.value if top is not None else []:
        if key.value != "defaults":
            keys += iter_keys(key, value, lines, head, "")
            continue
        for entry in value.value:
            if isinstance(entry, yaml.MappingNode):
                ((group, option),) = entry.value
                name = group.value.removeprefix("override ").removeprefix("/")
                choices[name] = (option.value, inline_comment(option, lines))
            elif entry.value != "_self_":
                bases.append(entry.value)
    return ConfigFile(about, bases, choices, keys)


def iter_keys(key, value, lines: list[str], head: int, prefix: str) -> Iterator[Key]:
    """Yield a key, then its nested keys."""
    name = f"{prefix}{key.value}"
    meaning = inline_comment(key if has_nested_keys(value) else value, lines)
    at = key.start_mark.line - 1
    above: list[str] = []
    while at >= head and lines[at].lstrip().startswith("#"):
        above.insert(0, lines[at].strip(" #"))
        at -= 1
    separator = ". " if meaning and above and meaning[-1] not in ".:" else " "
    meaning = f"{meaning}{separator}{' '.join(above)}".strip()
    if not has_nested_keys(value):
        yield Key(name, get_source(value, lines), meaning)
        return
    if meaning or not name.startswith("hydra"):
        yield Key(name, "", meaning)
    for inner, content in value.value:
        yield from iter_keys(inner, content, lines, head, f"{name}.")


def has_nested_keys(node) -> bool:
    """Return whether keys follow on lines of their own."""
    return isinstance(node, yaml.MappingNode) and not node.flow_style


def get_source(node, lines: list[str]) -> str:
    """Return a value as written in its file."""
    start, end = node.start_mark, node.end_mark
    if start.line != end.line:
        raise ValueError(f"a value spans several lines: {lines[start.line]}")
    return lines[start.line][start.column : end.column]


def inline_comment(node, lines: list[str]) -> str:
    """Return the comment after a key or a value."""
    rest = lines[node.end_mark.line][node.end_mark.column :].lstrip(" :")
    return rest.removeprefix("#").strip() if rest.startswith("#") else ""


def get_meaning(path: Path, key: Key) -> str:
    """Return the comment of a key: its own, that of a base file, or the key that it refers to."""
    if key.meaning:
        return key.meaning
    for base in read_config(path).bases:
        below = path.parent / f"{base}.yaml"
        for other in read_config(below).keys if below.exists() else []:
            if other.name == key.name:
                return get_meaning(below, other)
        if below.exists() and (found := get_meaning(below, key)):
            return found
    reference = re.fullmatch(r"\$\{([\w.]+)\}", key.value)
    return f"same as `{reference[1]}`" if reference else ""


def get_user_keys(path: Path) -> list[Key]:
    """Return the keys that users set: without the class, and of Hydra's those with a comment."""
    return [
        key
        for key in read_config(path).keys
        if key.name.rpartition(".")[2] not in INTERNAL_KEYS
        and (key.meaning or not key.name.startswith("hydra"))
    ]


def find_undescribed() -> list[str]:
    """Return groups, options and keys without a comment."""
    top = read_config(CONF / "train.yaml")
    missing = [group for group in list_groups() if not top.choices[group][1]]
    for path in sorted(CONF.rglob("*.yaml")):
        where = path.relative_to(CONF).with_suffix("")
        missing += [] if read_config(path).about else [str(where)]
        if path.parent.name != "experiment":
            keys = get_user_keys(path)
            missing += [f"{where}: {key.name}" for key in keys if not get_meaning(path, key)]
    return missing


def list_groups() -> list[str]:
    """Return the config groups in the order of train.yaml."""
    groups = list_config_groups()
    named = [group for group in read_config(CONF / "train.yaml").choices if group in groups]
    return named + sorted(set(groups) - set(named))


def command_section(name: str) -> list[str]:
    """Render a command: heading, description, keys."""
    lines = [f"## unet3d {name}", ""]
    path = CONF / f"{name}.yaml"
    if not path.exists():
        return [*lines, sentence(COMMANDS[name]), ""]
    file = read_config(path)
    lines += [*comment_lines(file.about), ""]
    groups = "[config groups](options.md#config-groups)"
    if name in READS:
        read = [f"[{key}](options.md#{key})" for key in READS[name] if key in list_groups()]
        read += [f"`{key}`" for key in READS[name] if key not in list_groups()]
        names = f"{', '.join(read[:-1])} and {read[-1]}"
        lines += [f"Reads {names} of {link('unet3d train')}, and", ""]
    elif "train" in file.bases:
        chosen = [f"`{g}={o}`" for g, (o, _) in file.choices.items() if not g.startswith("hydra")]
        others = f" (default: {', '.join(chosen)})" if chosen else ""
        lines += [f"Takes the keys and {groups} of {link('unet3d train')}{others}, and", ""]
    elif file.choices.keys() >= set(list_groups()):
        lines += [f"Takes the {groups}, and", ""]
    return [*lines, *key_table(path, "")]


def group_section(name: str) -> list[str]:
    """Render the options of a group, then the keys of each."""
    chosen, meaning = read_config(CONF / "train.yaml").choices[name]
    lines = [f"## {name}", "", f"{sentence(meaning)} Default: `{name}={chosen}`.", ""]
    paths = sorted((CONF / name).glob("[!_]*.yaml"))
    lines += [f"| `{name}=` | |", "| --- | --- |"]
    for path in paths:
        about = escape_bars(" ".join(split_paragraph(read_config(path).about)[0]))
        label = f"`{path.stem}`"
        if any(option_section(name, path)):
            label = f"[{label}](#{anchor(f'{name}={path.stem}')})"
        lines.append(f"| {label} | {about} |")
    lines.append("")
    for path in sorted((CONF / name).glob("_*.yaml")) + paths:
        if section := option_section(name, path):
            lines += [f"### {option_title(name, path.stem)}", "", *section]
    return lines


def option_section(group: str, path: Path) -> list[str]:
    """Render the class of an option, the rest of its comment, and its keys."""
    file, lines = read_config(path), list[str]()
    shared = path.stem.startswith("_")
    lines += comment_lines(file.about if shared else split_paragraph(file.about)[1])
    classes = [key.value for key in file.keys if key.name == "_target_" and "." in key.value]
    lines += [f"Class: `{name}`." for name in classes]
    if file.bases:
        bases = ", ".join(link(option_title(group, base)) for base in file.bases)
        lines.append(f"Same as {bases}, with" if get_user_keys(path) else f"Same as {bases}.")
    if group == "experiment":
        rows = [f"| `{g}` | `{option}` |" for g, (option, _) in file.choices.items()]
        rows += [
            f"| `{k.name}` | {escape_bars(f'`{k.value}`')} |"
            for k in get_user_keys(path)
            if k.value
        ]
        return ["| option or key | value |", "| --- | --- |", *rows, ""] if rows else []
    lines = [*lines, "", *key_table(path, f"{group}.")]
    return lines if any(lines) else []


def option_title(group: str, stem: str) -> str:
    """Return the heading of an option; `_base` holds what all options share."""
    return f"every {group}" if stem.startswith("_") else f"{group}={stem}"


def sentence(text: str) -> str:
    """Return text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def link(heading: str) -> str:
    """Return a link to a heading of the same page."""
    return f"[{heading}](#{anchor(heading)})"


def key_table(path: Path, prefix: str) -> list[str]:
    """Render one row per key."""
    rows = [
        f"| `{prefix}{key.name}` | {escape_bars(f'`{key.value}`') if key.value else ''} "
        f"| {escape_bars(get_meaning(path, key))} |"
        for key in get_user_keys(path)
    ]
    return ["| key | default | |", "| --- | --- | --- |", *rows, ""] if rows else []


def escape_bars(text: str) -> str:
    """Escape the bars of a table cell."""
    return text.replace("|", "\\|")


def split_paragraph(about: list[str]) -> tuple[list[str], list[str]]:
    """Split a comment after its first paragraph."""
    end = about.index("") if "" in about else len(about)
    return about[:end], about[end:]


def comment_lines(about: list[str]) -> list[str]:
    """Return a comment as text; lines indented by two spaces are shown as code."""
    lines = [f"    {line}" if line.startswith("  ") else line for line in about]
    return [re.sub(r"(?m)^(?! )(.+)\n(?=    )", r"\1\n\n", "\n".join(lines)), ""] if lines else []


def anchor(title: str) -> str:
    """Return the anchor that GitHub and the site give to a heading.

    >>> anchor("data=synthetic"), anchor("unet3d train")
    ('datasynthetic', 'unet3d-train')
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def join_lines(lines: list[str]) -> str:
    """Return lines as a page without repeated empty lines."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def commands_page() -> str:
    """Render docs/reference/commands.md."""
    lines = [COMMANDS_HEAD, "| command | |", "| --- | --- |"]
    for name, what in COMMANDS.items():
        lines.append(f"| [`{name}`](#{anchor(f'unet3d {name}')}) | {escape_bars(what)} |")
    lines.append("")
    for name in COMMANDS:
        lines += command_section(name)
    return join_lines(lines)


def options_page() -> str:
    """Render docs/reference/options.md."""
    lines = [OPTIONS_HEAD, "## Config groups", "", "| group | |", "| --- | --- |"]
    choices = read_config(CONF / "train.yaml").choices
    lines += [f"| {link(name)} | {escape_bars(choices[name][1])} |" for name in list_groups()]
    train = "[unet3d train](commands.md#unet3d-train)"
    lines += ["", f"The keys outside of groups are those of {train}.", ""]
    for name in list_groups():
        lines += group_section(name)
    return join_lines(lines)


PAGES = {"commands.md": commands_page, "options.md": options_page}


def main() -> int:
    for name, render in PAGES.items():
        (FOLDER / name).write_text(render())
    undescribed = find_undescribed()
    for what in undescribed:
        print(f"no comment describes {what}", file=sys.stderr)
    return 1 if undescribed else 0


if __name__ == "__main__":
    sys.exit(main())
