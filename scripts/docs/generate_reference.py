"""Generate docs/reference/ from conf/: `python -m scripts.docs.generate_reference`.

conf/ is the single source. The meaning of a key is the comment behind it, an option is described at
the head of its file, and a group behind its line in train.yaml. The exit code is 1 if a key has no
comment.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import yaml

from scripts.bench.results import ROOT
from unet3d.__main__ import COMMANDS
from unet3d.config.compose import list_config_groups, to_yaml_literal
from unet3d.config.keys import INTERNAL_KEYS, list_parent_files, read_keys

CONF = ROOT / "conf"
FOLDER = ROOT / "docs" / "reference"

COMMANDS_HEAD = """# Commands

Every command is `unet3d COMMAND key=value ...`. This page, generated from the comments in `conf/`,
lists the keys of each; config groups are in [Options](options.md). `???` means required, `null` no
value. `output=FOLDER` sets the folder of a run, sweep or search. In zsh, quote brackets and braces:
`'data.patch_size=[64,64,64]'`. `unet3d COMMAND --help` prints these keys.
"""

OPTIONS_HEAD = """# Options

`group=option` selects an option of a config group, and `key=value` sets a key, in any order. This
page, generated from the comments in `conf/`, lists all groups, options and keys.

- The command line overrides an [experiment](#experiment), and an experiment overrides the defaults.
- `null` means no value, `???` means required, and `[1,2,3]` is a list.
- Inherited keys are listed once, at the parent. A default is that of the first option named.
- `-m key=a,b` starts one run per value, and one per combination of several such lists.
- YAML files in a folder `conf/` of your working folder, in a subfolder for each group, add options.
- Keys of MONAI's networks, and of torch's optimizers and schedules, are not on this page:
  `unet3d train model=dynunet --help model` lists them.
"""

FOREIGN = re.compile(r"^_target_: (monai|torch)\.", re.MULTILINE)
"""Options of other projects, whose keys their documents describe."""


@dataclass(frozen=True)
class Key:
    """A key of a config file that users set."""

    name: str
    value: str
    comment: str  # behind it in the file; empty: the comment of a file that it extends

    def format_row(self, *owners: str) -> str:
        """Return the row of a table, which may say whose key it is."""
        cells = [f"`{self.name}`", *owners, self.value and f"`{self.value}`", self.comment]
        return f"| {' | '.join(map(escape_bars, cells))} |"


def list_keys(path: Path, prefix: str = "") -> list[Key]:
    """Return the keys of a file: without the class, values of other keys, and Hydra's own keys."""
    found = {}
    for name, key in read_keys(path, prefix).items():
        is_parent = isinstance(key.value, dict) and bool(key.value)
        is_reference = str(key.value).startswith("${")
        is_internal = name.rpartition(".")[2] in (*INTERNAL_KEYS, "defaults")
        is_described = key.comment or not (is_parent or is_reference)
        if is_described and not is_internal and not name.startswith("hydra"):
            value = "" if is_parent else to_yaml_literal(key.value)
            found[name] = Key(name, value, key.comment)
    parents = {name.rpartition(".")[0] for name in found}
    return [key for name, key in found.items() if key.value or name in parents]


def read_about(path: Path) -> tuple[str, list[str]]:
    """Return the first paragraph of the comment at the head of a file, and its other lines."""
    head = re.match(r"(?:#.*\n)*", path.read_text())
    lines = [line[1:].removeprefix(" ") for line in head[0].splitlines()] if head else []
    lines = [line for line in lines if not line.startswith("@package")]
    end = lines.index("") if "" in lines else len(lines)
    return " ".join(lines[:end]), lines[end:]


def read_choices(path: Path) -> dict[str, tuple[str, str]]:
    """Return the options that a file selects, and the comments behind them."""
    pattern = re.compile(r"^  - (?:override /?)?(\w+): (\S+)(?: # (.*))?$", re.MULTILINE)
    return {
        group: (option, comment) for group, option, comment in pattern.findall(path.read_text())
    }


def list_bases(path: Path) -> list[str]:
    """Return the names of the files that a file extends."""
    defaults = (yaml.safe_load(path.read_text()) or {}).get("defaults", [])
    return [name for name in defaults if isinstance(name, str) and name != "_self_"]


def list_groups() -> list[str]:
    """Return the config groups in the order of train.yaml."""
    groups = list_config_groups()
    named = [group for group in read_choices(CONF / "train.yaml") if group in groups]
    return named + sorted(set(groups) - set(named))


def find_undescribed() -> list[str]:
    """Return groups, options and keys without a comment."""
    choices = read_choices(CONF / "train.yaml")
    missing = [group for group in list_groups() if not choices[group][1]]
    for path in CONF.rglob("*.yaml"):
        group, name = path.parent.name, str(path.relative_to(CONF))
        missing += [] if read_about(path)[0] else [name]
        if group != "experiment":
            parents = [path, CONF / "train.yaml"]
            if path.parent != CONF:
                parents = [*list_parent_files(group, path.stem, [CONF])]
            described = {k.name for parent in parents for k in list_keys(parent) if k.comment}
            missing += [f"{name}: {k.name}" for k in list_keys(path) if k.name not in described]
    return missing


# Markdown.


def make_table(rows: list[str], heads: str = "| key | default | |") -> list[str]:
    return [heads, re.sub(r"[^|]+", " --- ", heads), *rows, ""] if rows else []


def make_key_table(owners_by_key: dict[Key, list[str]], head: str) -> list[str]:
    """Return a table of keys, with a column of those who have each unless all are of the same."""
    owners = [", ".join(names) for names in owners_by_key.values()]
    if len(set(owners)) <= 1:
        return make_table([key.format_row() for key in owners_by_key])
    rows = [key.format_row(names) for key, names in zip(owners_by_key, owners, strict=True)]
    return make_table(rows, f"| key | {head} | default | |")


def escape_bars(text: str) -> str:
    """Escape the bars of a table's cell."""
    return text.replace("|", "\\|")


def format_lines(lines: list[str]) -> list[str]:
    """Return a comment as text; lines indented by two spaces are shown as code."""
    text = "\n".join(f"    {line}" if line.startswith("  ") else line for line in lines)
    return [re.sub(r"(?m)^(?! )(.+)\n(?=    )", r"\1\n\n", text), ""]


def link(heading: str) -> str:
    """Return a link to a heading of the same page.

    >>> link("data=synthetic"), link("unet3d train")
    ('[data=synthetic](#datasynthetic)', '[unet3d train](#unet3d-train)')
    """
    anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    return f"[{heading}](#{anchor})"


def join_lines(lines: list[str]) -> str:
    """Return lines as a page without repeated empty lines."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def commands_page() -> str:
    """Render docs/reference/commands.md."""
    lines = [COMMANDS_HEAD, ", ".join(f"[`{name}`](#unet3d-{name})" for name in COMMANDS), ""]
    train = link("unet3d train")
    keys = {name: list_keys(CONF / f"{name}.yaml") for name in COMMANDS}
    shared = {key: [] for key, count in Counter(chain(*keys.values())).items() if count > 1}
    for name in COMMANDS:
        inherited = keys["train"] if "train" in list_bases(CONF / f"{name}.yaml") else []
        for key in shared.keys() & {*keys[name], *inherited}:
            shared[key].append(f"`{name}`")
    for owners in shared.values():
        owners[:] = ["every command"] if len(owners) == len(COMMANDS) else owners
    lines += ["## Keys of several commands", "", *make_key_table(shared, "commands")]
    for name in COMMANDS:
        path = CONF / f"{name}.yaml"
        about, rest = read_about(path)
        lines += [f"## unet3d {name}", "", about, *format_lines(rest)]
        choices = [f"`{g}={option}`" for g, (option, _) in read_choices(path).items()]
        if name == "train":
            lines += ["Takes the [config groups](options.md#config-groups), and", ""]
        elif "train" in list_bases(path):
            others = f" (default: {', '.join(choices)})" if choices else ""
            lines += [f"Takes [train's keys](#unet3d-train){others}, and", ""]
        elif name == "evaluate":
            lines += ["Takes [`metrics=`](options.md#metrics), and", ""]
        own = [replace(k, comment=k.comment or f"as in {train}") for k in keys[name]]
        own = [key for key in own if key not in shared and not key.comment.startswith("no effect")]
        lines += make_table([key.format_row() for key in own])
    return join_lines(lines)


def options_page() -> str:
    """Render docs/reference/options.md."""
    choices = read_choices(CONF / "train.yaml")
    rows = [f"| {link(name)} | {choices[name][1]} |" for name in list_groups()]
    lines = [OPTIONS_HEAD, "## Config groups", "", *make_table(rows, "| group | |")]
    lines += ["The keys outside of groups are those of [unet3d train](commands.md#unet3d-train)."]
    for group in list_groups():
        lines += ["", f"## {group}", "", f"Default: `{group}={choices[group][0]}`.", ""]
        sections, rows, owners_by_key, words_by_option = [], [], {}, {}
        for path in sorted((CONF / group).glob("*.yaml")):
            first, rest = read_about(path)
            keys = list_keys(path, "" if group == "experiment" else f"{group}.")
            whole = group == "experiment"
            is_listed = not whole and not FOREIGN.search(path.read_text())
            listed = [key for key in keys if key.comment] if is_listed else []
            if path.stem.startswith("_"):
                table = make_table([key.format_row() for key in listed])
                sections += [f"### every {group}", "", first, "", *format_lines(rest), *table]
                continue
            label, title = f"`{path.stem}`", f"{group}={path.stem}"
            if rest:
                sections += [f"### {title}", "", *format_lines(rest)]
                label = link(title).replace(title, label, 1)
            values = [key for key in keys if key.value and (whole or not key.comment)]
            for key in listed:
                same = [k for k in owners_by_key if (k.name, k.comment) == (key.name, key.comment)]
                owners_by_key.setdefault(*same or [key], []).append(f"`{path.stem}`")
                values += [key] if same and same[0].value != key.value else []
            words = words_by_option[path.stem] = list_words(path, values)
            about = " ".join([first, *describe_bases(path, words, words_by_option)])
            rows.append(f"| {label} | {escape_bars(about)} |")
        lines += make_table(rows, f"| `{group}=` | |")
        lines += [*make_key_table(owners_by_key, "option"), *sections]
    return join_lines(lines)


def list_words(path: Path, values: list[Key]) -> list[str]:
    """Return the options and the values that an option sets, as typed on the command line."""
    words = [f"{key.name}={key.value}" for key in values]
    if path.parent.name == "experiment":
        words = [f"{name}={option}" for name, (option, _) in read_choices(path).items()] + words
    return words


def describe_bases(
    path: Path, words: list[str], words_by_option: dict[str, list[str]]
) -> Iterator[str]:
    """Yield what an option extends, or is like but for one word, and the words that it sets."""
    bases = [f"`{base}`" for base in list_bases(path) if not base.startswith("_")]
    for other, others in words_by_option.items():
        different = [word for word in words if word not in others]
        if not bases and len(different) == 1 and len(words) == len(others) > 1:
            bases, words = [f"`{other}`"], different
    if bases:
        yield f"As {', '.join(bases)}" + (", with" if words else ".")
    elif words:
        yield "Sets"
    if words:
        yield f"`{' '.join(words)}`."


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
