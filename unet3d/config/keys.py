"""The keys of a command, as the config files have them: check them, and list them as help.

Keys that nothing reads, values of the wrong type and missing values are refused in one line.
"""

import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from textwrap import shorten
from typing import Any, NamedTuple

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unet3d.config.compose import (
    ComposedConfig,
    Composition,
    compose_config,
    find_user_config_dirs,
    get_config_dir,
    list_config_groups,
    list_options,
    protect_overrides,
    read_defaults,
    split_options,
    to_yaml_literal,
)
from unet3d.config.names import EARLIER_OPTIONS, HABITS, WIDTHS
from unet3d.errors import UsageError
from unet3d.text import flatten_keys

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)

KINDS = {dict: "a mapping of keys", list: "a list", str: "text", bool: "true or false"}
"""Words for the types of values in YAML; others are numbers."""

FOOTER = """--cfg job prints the composed config; debug=true shows tracebacks
in zsh, quote words with brackets: 'data.patch_size=[64,64,64]'"""

RUN_FOOTER = """output=FOLDER sets the run folder
-m key=a,b: one run per value, and one per combination of several such lists
YAML files in ./conf/GROUP/ add options to that group"""

POSITIONAL = {"compare": ["RUN ..."], "view": ["IMAGE [LABELS ...]"]}
"""The words without a key that a command takes."""

INTERNAL_KEYS = ("_target_", "_partial_")
"""Keys that select code: for authors of options, not for their users."""


class KnownKey(NamedTuple):
    """A key of the config files: the value that it has there, and the comment behind it."""

    value: Any
    comment: str


def collect_keys(composition: Composition) -> dict[str, KnownKey]:
    """Return the keys of a command and of its options.

    Of several files that have a key, the last value and the last comment win; but a mapping for
    what is null before is one of several kinds of values.
    """
    config_dirs = [get_config_dir(), *composition.config_dirs]
    train, own = (get_config_dir() / f"{name}.yaml" for name in ("train", composition.command))
    files = [(path, "") for path in ((train, own) if "train" in read_defaults(own) else (own,))]
    keys: dict[str, KnownKey] = {}
    for group, option in composition.choices.items():
        if group == "experiment":  # it sets keys of others
            continue
        keys[group] = KnownKey({}, "")
        for name in split_options(str(option)):
            files += [(path, f"{group}.") for path in list_parent_files(group, name, config_dirs)]
    for path, prefix in files:
        for name, key in read_keys(path, prefix).items():
            before = keys.get(name, key)
            is_open = before.value is None and isinstance(key.value, dict)
            keys[name] = KnownKey(None if is_open else key.value, key.comment or before.comment)
    return keys


def list_parent_files(group: str, option: str, config_dirs: Sequence[Path]) -> Iterator[Path]:
    """Yield an option's file, after the files that it extends."""
    paths = [folder / group / f"{option}.yaml" for folder in config_dirs]
    path = next((p for p in reversed(paths) if p.is_file()), None)
    if path is not None:
        for name in read_defaults(path):
            if not isinstance(name, str):  # an option of another group
                continue
            if name.startswith("/"):
                other, _, name = name.strip("/").rpartition("/")
                yield from list_parent_files(other, name, config_dirs)
            elif name not in ("_self_", option):
                yield from list_parent_files(group, name, config_dirs)
        yield path


def read_keys(path: Path, prefix: str = "") -> dict[str, KnownKey]:
    """Return the keys of a file with dots, after a prefix."""
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


def compose_api_config(
    command: str, overrides: Sequence[str], config_dir: Path | None = None
) -> ComposedConfig:
    """Return the checked config; an error is a UsageError.

    `config_dir` holds options of the user's, by default those in conf/ in the working folder.
    """
    args = protect_overrides(overrides, sweep=False)
    if config_dir is not None and not config_dir.is_dir():
        raise UsageError(f"config_dir: no folder {config_dir.absolute()}")
    user_dirs = find_user_config_dirs(config_dir)
    try:
        composed = compose_config(args, command, user_dirs)
        check_config(composed)
    except CONFIG_ERRORS as error:
        raise UsageError(format_config_error(error, command, args)) from error
    return composed


def check_config(composed: ComposedConfig) -> None:
    """Refuse unknown and missing keys, and arguments of another type than their default.

    They may come from the command line or from any file. Other values are checked where they are
    read.
    """
    known = collect_keys(composed.composition)
    defaults = {key: value for key, (value, _) in known.items()}
    for key, value in collect_values(composed.config).items():
        parent, _, name = key.rpartition(".")
        default, is_argument = defaults.get(key), f"{parent}._target_" in known
        is_mapping, is_auto = isinstance(default, dict), parent == "trainer" and value == "auto"
        if (is_argument or is_mapping) and not (is_auto or may_replace(value, default)):
            example = "" if is_mapping else f", as in {key}={default}"
            raise UsageError(f"{key} must be {name_kind(default)}{example}, got {value!r}")
        is_class = isinstance(value, dict) and "_target_" in value  # a callback, or the like
        if key in known or is_argument or is_class:  # a class refuses arguments it does not have
            continue
        if not parent or isinstance(defaults.get(parent), dict):
            siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == parent]
            kind = "key" if parent else "key or group"
            raise UsageError(f"no {kind} {key!r}{suggest_name(name, siblings)}")
    check_missing_keys(composed, known)


def check_missing_keys(composed: ComposedConfig, known: Mapping[str, KnownKey]) -> None:
    """Name every mandatory key without a value in one line; describe a single one."""
    nodes = {"": composed.config}
    if composed.composition.command in ("check", "plan", "train"):  # which read a dataset
        nodes["data."] = composed.config.data
    keys = [f"{p}{k}" for p, node in nodes.items() for k in node if OmegaConf.is_missing(node, k)]
    if not keys:
        return
    message = f"{', '.join(keys)} must be given: {' '.join(f'{key}=...' for key in keys)}"
    if len(keys) == 1 and keys[0] in known:
        message += f" ({known[keys[0]].comment})"
    raise UsageError(message)


def format_config_error(error: Exception, command: str, args: Sequence[str]) -> str:
    """Name the key or the option, and what was probably meant."""
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        # Hydra does not list the options of a group that is given several.
        names = [o for o in error.options or list_options(group) if not o.startswith("_")]
        options = [o for o in names if o not in EARLIER_OPTIONS.get(group, ())]
        hint = suggest_name(option, options)
        if hint == "." and group == "experiment":
            hint = f": unet3d plan name={option} writes conf/experiment/{option}.yaml."
        return f"no option {group}={option}{hint} Options: {', '.join(options)}."
    match = re.search(r"Could not override '([^']+)'", str(error))
    if isinstance(error, ConfigCompositionException) and match:
        key = match[1]
        if habit := HABITS.get(key.removeprefix("trainer.")):
            return f"no key {key!r}: {habit}"
        keys = list(list_known_keys(command, args, key))
        if key == "model.width" and (own := next((k for k in keys if k in WIDTHS), None)):
            return f"no key {key!r}: in this network it is {own}"
        option = find_option_with(key)
        if option is not None:
            return f"no key {key!r} here: it is one of {option}"
        hint = suggest_name(key, (k for k in keys if "._" not in k and k != key))
        return f"no key or group {key!r}" + (
            f": unet3d {command} --help lists all keys" if hint == "." else hint
        )
    if isinstance(error, OverrideParseException):
        word, advice = str(error.override), "quote special characters, as in key=\"'a, b'\""
        if word.count("[") > word.count("]"):  # the shell has split it
            advice = "write a list without blanks, as in key=[1,2,3], or quote it: 'key=[1, 2, 3]'"
        return f"cannot parse {word!r}: {advice}"
    if match := re.search(r"Ambiguous value for argument '([^=]+)=(.*)'", str(error)):
        key, values = match.groups()
        return f"{key} has several values: write {key}=[{values}] for a list, -m for a run of each"
    if match := re.search(r"Error merging override ([^=]+)=(\[.*)", str(error)):
        key, value = match.groups()
        return f"{key} is a mapping in a file: write '~{key}' '+{key}={value}' to replace it"
    text = re.sub(r"\s+full_key:.*", "", str(error), flags=re.DOTALL)  # OmegaConf's details
    key = getattr(error, "full_key", None)
    return " ".join(f"{key}: {text}".split() if key else text.split())


def list_known_keys(command: str, args: Sequence[str], bad_key: str) -> Iterator[str]:
    """Yield every key and group of the config as the other overrides make it."""
    groups = list_config_groups()
    yield from groups
    choices = [a for a in args if a.split("=")[0] in groups and a.split("=")[0] != bad_key]
    GlobalHydra.instance().clear()
    try:
        yield from collect_values(compose_config(choices, command).config)
    except HydraException:  # another override is wrong, too
        return


def find_option_with(key: str) -> str | None:
    """Return an option of the key's group that has the key, as `group=option`."""
    group, _, rest = key.partition(".")
    for option in list_options(group) if rest and group in list_config_groups() else ():
        if rest in read_keys(get_config_dir() / group / f"{option}.yaml"):
            return f"{group}={option}"
    return None


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant, as the end of a sentence.

    >>> suggest_name("lr", ["logger", "optimizer.lr", "model.layers"])
    '; did you mean optimizer.lr?'
    >>> suggest_name("data.patch", ["data.pattern", "data.patch_size"])
    '; did you mean data.patch_size?'
    """
    names, last = list(known), name.rpartition(".")[2]
    parts = {key.rpartition(".")[2]: key for key in reversed(names)}  # of equal ones, the first
    near = [last] if last in parts else [key for key in names if key.startswith(f"{name}_")][:1]
    near = near or get_close_matches(name, names, n=1, cutoff=0.65)
    near = near or get_close_matches(last, parts, n=1, cutoff=0.75)
    return f"; did you mean {parts.get(near[0], near[0])}?" if near else "."


def collect_values(config: DictConfig | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of all keys with dots, also of those that hold others; resolve nothing.

    >>> collect_values(OmegaConf.create({"a": {"b": "${c}"}}))
    {'a': {'b': '${c}'}, 'a.b': '${c}'}
    """
    plain: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
    values: dict[str, Any] = {}
    for key, value in plain.items():
        values[f"{prefix}{key}"] = value
        values |= collect_values(value, f"{prefix}{key}.") if isinstance(value, dict) else {}
    return values


def name_kind(value: Any) -> str:
    """Describe the type of a value, as in `text`."""
    return KINDS.get(type(value), "a number")


def may_replace(value: Any, default: Any) -> bool:
    """Return whether a value may replace a default: lists and null replace numbers and text, too.

    >>> may_replace([3, 3, 1], 3), may_replace(2, 0.5), may_replace("2", 0.5), may_replace(1, True)
    (True, True, False, False)
    """
    if any(isinstance(x, str) and x.startswith("${") for x in (value, default)):  # it follows a key
        return True
    is_open = value is None or isinstance(value, list) or isinstance(default, str)
    is_simple = not isinstance(default, bool | dict) and not isinstance(value, dict)
    return default is None or (is_open and is_simple) or name_kind(value) == name_kind(default)


def list_overview(
    own: Mapping[str, Any], choices: Mapping[str, str], known: Mapping[str, KnownKey], columns: int
) -> dict[str, list[tuple[str, str]]]:
    """Return the groups and the keys outside of them, with what is said of each in a line."""
    text = (get_config_dir() / "train.yaml").read_text("utf-8")
    groups = {
        f"{group}={option}": comment
        for group, option, comment in re.findall(r"^  - (\w+): (\S+) # (.*)$", text, re.MULTILINE)
        if group in choices
    }
    values = {key: own[key] for key in own if key not in ("defaults", "hydra")}
    keys = {
        f"{key}={to_yaml_literal(value)}": known[key].comment for key, value in flatten_keys(values)
    }
    room = columns - max(map(len, [*groups, *keys])) - 4
    sections = {
        "config groups (--help GROUP: its options and keys; --help all: everything)": groups
    }
    return {
        title: [(word, shorten(text, room)) for word, text in part.items()]
        for title, part in (sections | {"keys": keys}).items()
    }


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


def list_key_values(config: DictConfig) -> list[tuple[str, str]]:
    """Return keys with values as a command line has them; those that follow a key are left out.

    >>> list_key_values(OmegaConf.create({"a": {"b": [1, None], "c": "???", "_target_": "x"}}))
    [('a.b', '[1,null]'), ('a.c', '...')]
    """
    plain: Any = OmegaConf.to_container(config)
    return [
        (key, "..." if value == "???" else to_yaml_literal(value))
        for key, value in flatten_keys(plain)
        if key.rpartition(".")[2] not in INTERNAL_KEYS and not str(value).startswith("${")
    ]


def format_command_help(
    command: str,
    about: str,
    overrides: Sequence[str],
    user_dirs: Sequence[Path],
    topics: Sequence[str] = (),
) -> str:
    """Return the command's keys, and train's options, as these overrides make them.

    `topics` are groups to show alone, or all. Without these and overrides, train has an overview.
    """
    composed = compose_config(overrides, command, user_dirs)
    config_dirs = [get_config_dir(), *composed.composition.config_dirs]
    known, groups = collect_keys(composed.composition), list_config_groups()
    choices = {g: o for g, o in sorted(composed.composition.choices.items()) if g in groups}
    own = yaml.safe_load((get_config_dir() / f"{command}.yaml").read_text("utf-8"))

    required = [f"{key}=..." for key, value in own.items() if value == "???"]
    words = ["unet3d", command, *POSITIONAL.get(command, required), "[key=value ...]"]
    groups = [topic for topic in topics if topic != "all"]
    shown = groups or (composed.config if command == "train" or topics else own)
    keys = [pair for pair in list_key_values(composed.config) if pair[0].split(".")[0] in shown]
    keys.sort(key=lambda pair: (pair[1] != "...", pair[0].split(".")[0] not in own))
    rows = [(f"{k}={v}", known[k].comment if k in known else "") for k, v in keys]
    sections: dict[str, Any] = {"keys: key=value (... = required)": rows}
    layout = {"max_help_position": 42}
    if groups:
        rows = [row for g in groups for row in list_option_help(g, choices.get(g, ""), config_dirs)]
        sections = {"options: group=option (* = selected)": rows} | sections
    elif command == "train":
        about = f"{about}\n\n{RUN_FOOTER}"
        options = [row for g, o in choices.items() for row in list_option_help(g, o, config_dirs)]
        sections = {"config groups: group=option (* = selected)": options} | sections
        if not overrides and not topics:
            layout = {"max_help_position": 80, "width": get_terminal_size().columns}
            sections = list_overview(own, choices, known, layout["width"])
    elif choices:
        selected = " ".join(f"{group}={option}" for group, option in choices.items())
        others = f"the options that --help {' '.join(choices)} lists"
        if "train" in own["defaults"]:
            others = "all options and keys of unet3d train"
        about = f"{about}\n\nalso accepted: {others}; here {selected}"
    parser = ArgumentParser(
        usage=" ".join(words),
        description=about,
        epilog=FOOTER,
        add_help=False,
        formatter_class=partial(RawDescriptionHelpFormatter, **layout),
    )
    for title, rows in sections.items():
        section = parser.add_argument_group(title)
        for name, text in rows:
            section.add_argument(name, help=text.replace("%", "%%"))
    return parser.format_help()
