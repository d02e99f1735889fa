"""Take docs/reference.md from conf/: `python scripts/reference.py`.

conf/ is the one source: what a key means is the comment beside it (or above it), what an option is
stands at its file's head, what a group chooses beside its line in train.yaml. A test fails where a
key has no comment, or where the page is not what this makes.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from unet3d.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
PAGE = ROOT / "docs" / "reference.md"
WIDTH = 100

HEAD = """# Reference

Every verb of `unet3d`, every option and key, and every file of a run. This page is made of the
comments in `conf/` by `python scripts/reference.py`, and a test compares. `unet3d VERB --help`
prints the same keys with their values, `unet3d VERB ... --cfg job` the config that a command has.

`key=value` sets a key, `group=option` takes an option of a group, in any order; `-m` tries every
combination of values with commas between them. The command line decides over an
[experiment](#experiment), and that over the defaults. `null` is no value, lists are `[1,2,3]`,
`${data.root}` follows another key, `???` must be given. A `conf/` in your working folder adds
options of your own. A key that does not exist is refused, and the nearest one named.
"""

FILES = {
    "`unet3d train`, in `hydra.run.dir`": {
        "report.json": "what the run reached and took: `finished`, `steps`, `metrics`, `memory` in "
        "bytes by phase, `speed`, `evaluation`, `parameters`, `left_out`, `skipped_steps`, "
        "`warnings`, `precision`, `choices`, `config`, `versions`, `device`",
        "config.yaml": "the config as it was used, with nothing left to look up",
        "checkpoints/last.ckpt": "all that is needed to go on (`resume=auto`) or to predict; at "
        "most `save_every_seconds=` old",
        "checkpoints/previous.ckpt": "the one before it, should that be damaged",
        "checkpoints/best.ckpt": "the weights with the highest `val/dice` so far; `fold=none` has "
        "no such file",
        "checkpoints/damaged.ckpt": "a `last.ckpt` that was found damaged and set aside",
        "validation/*.nii.gz": "the best checkpoint's labels for each validation case, on the grid "
        "of its image",
        "evaluation/evaluation.json": "scores of these: means with intervals, per class and case, "
        "with definitions",
        "evaluation/evaluation.csv": "a line for each case and class",
        "evaluation/evaluation.png": "the same as a box plot",
        "evaluation/worst/*.png": "the cases with the lowest Dice, drawn over their image",
        "tensorboard/events.out.tfevents.*": "curves, slices with reference and prediction, what a "
        "step takes as pictures, the config, hparams: `tensorboard --logdir` this folder",
        ".hydra/*.yaml": "what Hydra composed, its own settings, and the overrides as typed",
        "memory_snapshot.pickle": "with `meter.snapshot=true`, where a GPU's memory ran out: for "
        "pytorch.org/memory_viz",
    },
    "`unet3d train -m`, in `hydra.sweep.dir`": {
        "0/, 1/, ...": "the folder of each run, as above",
        "multirun.yaml": "what Hydra composed for the sweep",
        "comparison.png": "Dice against memory and seconds, if two runs came to something; `unet3d "
        "compare` draws it and its table anew",
    },
    "`unet3d predict`, in `output`": {
        "NAME.nii.gz": "labels on the grid of the scan NAME",
        "probabilities/NAME.nii": "with `probabilities=true`: float32, a volume for each class, "
        "the classes being the last axis",
    },
    "`unet3d evaluate`, in `output`": {
        "evaluation.json, .csv, .png, worst/": "as in a run's `evaluation/`",
    },
    "the working folder": {
        "conf/experiment/planned.yaml, .png": "what `unet3d plan` decided, and a picture of the "
        "data set",
        "data/synthetic/": "the default job's volumes, made when they are missing",
        "data/prepared/": "volumes as training reads them; delete it whenever you like",
    },
}
"""Where, and then a pattern of names: what is there. A test compares with a real run."""

CODES = {
    "0": "done",
    "1": "some cases failed, `check` found faults, or some jobs of a sweep failed",
    "2": "misuse: a key, value, file or folder that cannot be; nothing was computed",
    "3": "out of memory, or predicted not to fit where that was to stop the run",
    "4": "a fault at run time: NaN, a dead data worker, a full disk, a lost process",
    "130": "stopped by Ctrl-C; `resume=auto` goes on",
    "143": "stopped by SIGTERM or SIGUSR1; `resume=auto` goes on",
}

VARIABLES = {
    "XDG_CACHE_HOME": "compiled kernels are kept in its `unet3d/`; else in `~/.cache/unet3d/`",
    "CXX": "the C++ compiler for the CPU's kernels; else `g++`, `clang++` or `c++`, and without "
    "one plain torch computes the same, more slowly",
    "TRITON_CACHE_DIR": "where Triton keeps the GPU's kernels",
    "TORCHINDUCTOR_CACHE_DIR": "where `compile=true` keeps what it made",
    "OMP_NUM_THREADS": "threads of a process on a CPU; a run of several processes shares the cores "
    "out by itself",
    "RANK, SLURM_PROCID, ...": "what torchrun and srun tell their processes; a run that they "
    "started needs `trainer=torchrun` or `trainer=slurm`",
}


@dataclass(frozen=True)
class Key:
    """A line of a config."""

    name: str  # with dots, within its file
    value: str  # as it is written; empty where keys follow
    meaning: str  # its comment


@dataclass(frozen=True)
class File:
    """A file of conf/, as far as a reader needs to know it."""

    about: list[str]  # the comment at its head, line by line
    bases: list[str]  # files beside it that it begins with
    choices: dict[str, tuple[str, str]]  # group -> option in its defaults, and the comment there
    keys: list[Key]


@cache
def read(path: Path) -> File:
    """Keys from YAML's own parser; comments from what is left of their lines."""
    lines = path.read_text().splitlines()
    head = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    about = [line.removeprefix("#").removeprefix(" ") for line in lines[:head]]
    about = [line for line in about if not line.startswith("@package")]
    top = yaml.compose("\n".join(lines), Loader=yaml.SafeLoader)
    bases, choices, keys = [], {}, []
    for key, value in top.value if top is not None else []:
        if key.value != "defaults":
            keys += keys_of(key, value, lines, head, "")
            continue
        for entry in value.value:
            if isinstance(entry, yaml.MappingNode):
                ((group, option),) = entry.value
                name = group.value.removeprefix("override ").removeprefix("/")
                choices[name] = (option.value, beside(option, lines))
            elif entry.value != "_self_":
                bases.append(entry.value)
    return File(about, bases, choices, keys)


def keys_of(key, value, lines: list[str], head: int, prefix: str) -> Iterator[Key]:
    """A key, and those below it."""
    name = f"{prefix}{key.value}"
    meaning = beside(key if deeper(value) else value, lines)
    at = key.start_mark.line - 1
    above: list[str] = []
    while at >= head and lines[at].lstrip().startswith("#"):
        above.insert(0, lines[at].strip(" #"))
        at -= 1
    meaning = " ".join([meaning, *above]).strip()
    if not deeper(value):
        yield Key(name, written(value, lines), meaning)
        return
    if meaning or not name.startswith("hydra"):
        yield Key(name, "", meaning)
    for inner, content in value.value:
        yield from keys_of(inner, content, lines, head, f"{name}.")


def deeper(node) -> bool:
    """Whether keys follow on lines of their own."""
    return isinstance(node, yaml.MappingNode) and not node.flow_style


def written(node, lines: list[str]) -> str:
    """A value as it stands in its file."""
    start, end = node.start_mark, node.end_mark
    if start.line != end.line:
        raise ValueError(f"a value over several lines: {lines[start.line]}")
    return lines[start.line][start.column : end.column]


def beside(node, lines: list[str]) -> str:
    """The comment behind a key or a value."""
    rest = lines[node.end_mark.line][node.end_mark.column :].lstrip(" :")
    return rest.removeprefix("#").strip() if rest.startswith("#") else ""


def meaning_of(path: Path, key: Key) -> str:
    """A key's own comment, that of the file it came from, or what it follows."""
    if key.meaning:
        return key.meaning
    for base in read(path).bases:
        beneath = path.parent / f"{base}.yaml"
        for other in read(beneath).keys if beneath.exists() else []:
            if other.name == key.name:
                return meaning_of(beneath, other)
        if beneath.exists() and (found := meaning_of(beneath, key)):
            return found
    followed = re.fullmatch(r"\$\{([\w.]+)\}", key.value)
    return f"follows `{followed[1]}`" if followed else ""


def shown(path: Path) -> list[Key]:
    """The keys that a reader sets: not the class, and of Hydra's those that have a comment."""
    return [
        key
        for key in read(path).keys
        if key.name.rpartition(".")[2] not in ("_target_", "_partial_")
        and (key.meaning or not key.name.startswith("hydra"))
    ]


def undescribed() -> list[str]:
    """Groups, options and keys without a comment."""
    missing = [group for group in groups() if not read(CONF / "train.yaml").choices[group][1]]
    for path in sorted(CONF.rglob("*.yaml")):
        where = path.relative_to(CONF).with_suffix("")
        missing += [] if read(path).about else [str(where)]
        if path.parent.name != "experiment":
            missing += [f"{where}: {k.name}" for k in shown(path) if not meaning_of(path, k)]
    return missing


def groups() -> list[str]:
    """In the order of train.yaml."""
    there = {path.name for path in CONF.iterdir() if path.is_dir()}
    named = [group for group in read(CONF / "train.yaml").choices if group in there]
    return named + sorted(there - set(named))


def verb(name: str) -> list[str]:
    """A verb's heading, what it does, and its keys."""
    lines = [f"### unet3d {name}", ""]
    path = CONF / f"{name}.yaml"
    if not path.exists():
        return [*lines, f"{sentence(COMMANDS[name])}", ""]
    file = read(path)
    lines += [*told(file.about), ""]
    if "train" in file.bases:
        lines += [
            f"Beside {link('unet3d train')}'s keys and [groups](#groups){otherwise(file)}:",
            "",
        ]
    elif file.choices.keys() >= set(groups()):
        lines += ["Beside the [groups](#groups):", ""]
    return [*lines, *table(path, "")]


def otherwise(file: File) -> str:
    """What a verb chooses that train does not."""
    chosen = [f"`{g}={o}`" for g, (o, _) in file.choices.items() if not g.startswith("hydra")]
    return f", of which it takes {', '.join(chosen)} unless you choose" if chosen else ""


def group(name: str) -> list[str]:
    """A group's options, then the keys of each."""
    chosen, meaning = read(CONF / "train.yaml").choices[name]
    lines = [f"### {name}", "", f"{sentence(meaning)} Default: `{name}={chosen}`.", ""]
    paths = sorted((CONF / name).glob("[!_]*.yaml"))
    lines += [f"| `{name}=` | |", "| --- | --- |"]
    for path in paths:
        about = cell(" ".join(paragraph(read(path).about)))
        more = "".join(option(name, path))
        there = f"[`{path.stem}`](#{anchor(f'{name}={path.stem}')})" if more else f"`{path.stem}`"
        lines.append(f"| {there} | {about} |")
    lines.append("")
    for path in sorted((CONF / name).glob("_*.yaml")) + paths:
        if more := option(name, path):
            lines += [f"#### {title(name, path.stem)}", "", *more]
    return lines


def option(group: str, path: Path) -> list[str]:
    """An option's class, the rest of what its file says, and its keys."""
    file, lines = read(path), list[str]()
    if file.about:
        lines += told(file.about if path.stem.startswith("_") else file.about[first(file.about) :])
    made = [key.value for key in file.keys if key.name == "_target_" and "." in key.value]
    lines += [f"Makes `{name}`." for name in made]
    if file.bases:
        as_ = ", ".join(link(title(group, base)) for base in file.bases)
        lines.append(f"As {as_}, with:" if shown(path) else f"As {as_}.")
    if group == "experiment":
        words = [f"{g}={o}" for g, (o, _) in file.choices.items()]
        words += [f"{key.name}={key.value.replace(' ', '')}" for key in shown(path) if key.value]
        return ["```", *wrapped(words), "```", ""] if words else []
    lines = [*lines, "", *table(path, f"{group}.")]
    return lines if any(lines) else []


def title(group: str, stem: str) -> str:
    """The heading of an option; `_base` is what all of them have."""
    return f"every {group}" if stem.startswith("_") else f"{group}={stem}"


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def link(heading: str) -> str:
    """To a heading of this page."""
    return f"[{heading}](#{anchor(heading)})"


def table(path: Path, prefix: str) -> list[str]:
    """A row for each key."""
    rows = [
        f"| `{prefix}{key.name}` | {cell(f'`{key.value}`') if key.value else ''} "
        f"| {cell(meaning_of(path, key))} |"
        for key in shown(path)
    ]
    return ["| key | default | |", "| --- | --- | --- |", *rows, ""] if rows else []


def cell(text: str) -> str:
    """Text that a table's bars do not cut."""
    return text.replace("|", "\\|")


def first(about: list[str]) -> int:
    """Where the first paragraph of a comment ends."""
    return about.index("") if "" in about else len(about)


def paragraph(about: list[str]) -> list[str]:
    """The first one of a comment."""
    return about[: first(about)]


def told(about: list[str]) -> list[str]:
    """A comment as text; what is set in by two spaces is a picture of a folder, or to be typed."""
    lines = [f"    {line}" if line.startswith("  ") else line for line in about]
    return [re.sub(r"(?m)^(?! )(.+)\n(?=    )", r"\1\n\n", "\n".join(lines)), ""] if lines else []


def wrapped(words: list[str]) -> Iterator[str]:
    """Words in lines of a readable width."""
    line = ""
    for word in words:
        if line and len(line) + len(word) >= WIDTH:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


def anchor(title: str) -> str:
    """What GitHub makes of a heading.

    >>> anchor("data=synthetic"), anchor("unet3d get_data")
    ('datasynthetic', 'unet3d-get_data')
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def page() -> str:
    """All of docs/reference.md."""
    lines = [HEAD, "| `unet3d` | |", "| --- | --- |"]
    lines += [
        f"| [`{v}`](#{anchor(f'unet3d {v}')}) | {cell(what)} |" for v, what in COMMANDS.items()
    ]
    lines += ["", "Groups: " + ", ".join(map(link, groups())) + "."]
    lines += ["", f"Also {link('Files')}, {link('Exit codes')}, {link('Environment')}."]
    lines += ["", "## Verbs", ""]
    for name in COMMANDS:
        lines += verb(name)
    lines += ["## Groups", ""]
    for name in groups():
        lines += group(name)
    lines += ["## Files", ""]
    for where, files in FILES.items():
        lines += [f"| {where} | |", "| --- | --- |"]
        lines += [f"| `{name}` | {what} |" for name, what in files.items()]
        lines.append("")
    for title, rows in (("Exit codes", CODES), ("Environment", VARIABLES)):
        lines += [f"## {title}", "", "| | |", "| --- | --- |"]
        lines += [f"| `{name}` | {what} |" for name, what in rows.items()] + [""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main() -> int:
    for what in undescribed():
        print(f"no comment says what this is: {what}", file=sys.stderr)
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
