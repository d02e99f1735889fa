"""Check a config that was composed, and say in one line what is wrong with one that was not.

Keys that nothing reads, values of the wrong type and missing values are refused.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from unet3d.config.comments import KnownKey, collect_keys
from unet3d.config.compose import (
    ComposedConfig,
    compose_config,
    compose_with_folder,
    find_local_config_dir,
    get_config_dir,
    list_config_groups,
    list_options,
    make_search_path,
    quote_override,
)
from unet3d.errors import UsageError

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)

MAPPING, LIST = "a mapping of keys", "a list"
KINDS = {dict: MAPPING, DictConfig: MAPPING, list: LIST, ListConfig: LIST, str: "text"}
KINDS[bool] = "true or false"

TAKE_AUTO = ("trainer.devices", "trainer.cuda_graph", "trainer.enable_progress_bar")
"""Arguments that are a number or a flag, or the word auto."""

DATASET_COMMANDS = ("check", "plan", "train")
"""Commands that read a dataset: missing keys of the group `data` must be given, too."""


def compose_call(
    command: str, overrides: Sequence[str], config_dir: Path | None = None
) -> tuple[ComposedConfig, Path]:
    """Return the checked config and the folder of the run; an error is a UsageError.

    `config_dir` holds options of the user's, by default those in conf/ in the working folder.
    """
    args = [quote_override(text, sweep=False) for text in overrides]
    if config_dir is not None and not config_dir.is_dir():
        raise UsageError(f"config_dir: no folder {config_dir.absolute()}")
    user_dirs = find_local_config_dir() if config_dir is None else [config_dir.absolute()]
    path = make_search_path(user_dirs)
    try:
        with initialize_config_dir(str(get_config_dir()), version_base="1.3"):
            composed, folder = compose_with_folder([*path, *args], command)
            check_config(composed, user_dirs)
    except CONFIG_ERRORS as error:
        raise UsageError(format_config_error(error, command, args)) from error
    return composed, folder


def check_config(composed: ComposedConfig, user_dirs: Sequence[Path]) -> None:
    """Refuse keys that no option has, arguments of the wrong type, and missing values.

    It does not matter where they were written. Whoever reads a value of a command checks it.
    """
    known = collect_keys(composed.composition, [get_config_dir(), *user_dirs])
    check_keys(composed.config, known)
    check_missing_keys(composed, known)


def check_keys(config: DictConfig, known: Mapping[str, KnownKey]) -> None:
    """Refuse unknown keys, and arguments of a `_target_` of another type than their defaults."""
    nothing = KnownKey(None, "")
    for key in iter_keys(config):
        parent, _, name = key.rpartition(".")
        value, default = _select(config, key), known.get(key, nothing).value
        follows = isinstance(default, str) and default.startswith("${")
        is_auto = key in TAKE_AUTO and value == "auto"
        if f"{parent}._target_" in known:  # which refuses names that it does not have
            if default is not None and not (follows or is_auto or may_replace(value, default)):
                example = "" if isinstance(default, dict) else f", as in {key}={default}"
                raise UsageError(f"{key} must be {name_kind(default)}{example}, got {value!r}")
        elif isinstance(default, dict) and not isinstance(value, DictConfig):
            raise UsageError(f"{key} must be {name_kind(default)}, got {value!r}")
        elif key not in known and (
            not parent or isinstance(known.get(parent, nothing).value, dict)
        ):
            if isinstance(value, DictConfig) and "_target_" in value:  # a callback, or the like
                continue
            siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == parent]
            kind = "key" if parent else "key or group"
            raise UsageError(f"no {kind} {key!r}{suggest_name(name, siblings)}")


def check_missing_keys(composed: ComposedConfig, known: Mapping[str, KnownKey]) -> None:
    """Name every mandatory key without a value in one line; describe a single one."""
    nodes = {"": composed.config}
    if composed.composition.command in DATASET_COMMANDS:
        nodes["data."] = composed.config.data
    keys = [f"{p}{k}" for p, node in nodes.items() for k in node if OmegaConf.is_missing(node, k)]
    if not keys:
        return
    *others, last = keys
    names = f"{', '.join(others)} and {last}" if others else last
    message = f"{names} must be given: {' '.join(f'{key}=...' for key in keys)}"
    if not others and last in known:
        message += f" ({known[last].comment})"
    raise UsageError(message)


def format_config_error(error: Exception, command: str, args: Sequence[str]) -> str:
    """Name the key or the option, and what was probably meant."""
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        # Hydra does not list the options of a group that is given several.
        options = [o for o in error.options or list_options(group) if not o.startswith("_")]
        hint = suggest_name(option, options)
        if hint == "." and group == "experiment":
            hint = f": unet3d plan name={option} writes conf/experiment/{option}.yaml."
        return f"no option {group}={option}{hint} Options: {', '.join(options)}."
    if isinstance(error, ConfigCompositionException):
        match = re.search(r"Could not override '([^']+)'", str(error))
        if match:
            key = match[1]
            option = find_option_with(key)
            if option is not None:
                return f"no key {key!r} here: it is one of {option}"
            keys = list_known_keys(command, args, key)
            hint = suggest_name(key, (k for k in keys if "._" not in k and k != key))
            if hint == ".":
                hint = f": unet3d {command} --help lists all keys"
            return f"no key or group {key!r}{hint}"
    if isinstance(error, OverrideParseException):
        return f"cannot parse {error.override!r}: quote special characters, as in key=\"'a, b'\""
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
        composed = compose_config(choices, command)
    except HydraException:  # another override is wrong, too
        return
    yield from iter_keys(composed.config)


def find_option_with(key: str) -> str | None:
    """Return an option of the key's group that has the key, as `group=option`."""
    group, _, rest = key.partition(".")
    for option in list_options(group) if rest and group in list_config_groups() else ():
        node = OmegaConf.load(get_config_dir() / group / f"{option}.yaml")
        if isinstance(node, DictConfig) and rest in iter_keys(node):
            return f"{group}={option}"
    return None


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return the known names that were probably meant, as the end of a sentence.

    Of keys with dots, the last parts are compared, since that is what people remember: they are
    the same, or have all words of the name, or differ from it by a typing error.

    >>> suggest_name("lr", ["logger", "optimizer.lr", "model.layers"])
    '; did you mean optimizer.lr?'
    """
    group, _, last = name.rpartition(".")
    names = list(dict.fromkeys(known))
    for candidates in ([k for k in names if group and k.startswith(f"{group}.")], names):
        parts = {candidate: candidate.rpartition(".")[2] for candidate in candidates}
        longer = [p for p in parts.values() if set(last.split("_")) <= set(p.split("_"))]
        near = [last] if last in longer else get_close_matches(last, longer, cutoff=0)
        near = near or get_close_matches(last, parts.values(), cutoff=0.75)
        ranks = {k: (k.count("."), near.index(p)) for k, p in parts.items() if p in near}
        if ranks:
            meant = [key for key, rank in ranks.items() if rank == min(ranks.values())]
            return f"; did you mean {' or '.join(meant)}?"
    return "."


def iter_keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield keys with dots.

    >>> list(iter_keys(OmegaConf.create({"a": {"b": 1}})))
    ['a', 'a.b']
    """
    for key in config:
        name = f"{prefix}{key}"
        yield name
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            yield from iter_keys(node, f"{name}.")


def name_kind(value: Any) -> str:
    """Say which values are of the kind of this one."""
    return KINDS.get(type(value), "a number")


def may_replace(value: Any, default: Any) -> bool:
    """Return whether a value may replace a default: lists and null replace numbers and text, too.

    >>> may_replace([3, 3, 1], 3), may_replace(2, 0.5), may_replace("2", 0.5), may_replace(1, True)
    (True, True, False, False)
    """
    if isinstance(default, bool | dict) or isinstance(value, DictConfig):
        return name_kind(value) == name_kind(default)
    is_open = value is None or isinstance(value, list | ListConfig) or isinstance(default, str)
    return is_open or name_kind(value) == name_kind(default)


def _select(config: DictConfig, key: str) -> Any:
    """Return a value; None if there is none, or if it refers to a missing one."""
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return None
