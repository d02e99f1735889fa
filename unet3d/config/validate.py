"""Refuse keys that nothing reads, values of the wrong type, and missing values."""

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unet3d.config.comments import collect_comments
from unet3d.config.compose import (
    ComposedConfig,
    compose_config,
    get_config_dir,
    list_config_groups,
    list_options,
)
from unet3d.config.values import MAX_INT, check_size, shorten
from unet3d.errors import UsageError

MIXED_TYPES = (
    *("precision", "fold", "seed", "budget_gib"),
    *("devices", "trainer.devices", "data.background", "tta", "tolerance_mm"),
    *("trainer.cuda_graph", "trainer.enable_progress_bar"),
)
"""Keys that take values of several types; they are checked where they are parsed."""

SENDS = ("mode", "online")
"""The key and value of a logger that sends what it logs."""

RECEIVERS = ("tracking_uri", "entity")
"""Keys of loggers that say where they send it."""

DATASET_COMMANDS = ("check", "plan", "train")
"""Commands that read a dataset: missing keys of the group `data` must be given, too."""


def check_config(composed: ComposedConfig, user_dirs: Sequence[Path]) -> None:
    """Refuse keys that nothing reads, values of the wrong type, and missing values."""
    check_unknown_keys(composed.config, composed.composition.command)
    check_value_types(composed)
    check_loggers(composed)
    check_missing_keys(composed, [get_config_dir(), *user_dirs])


def check_unknown_keys(config: DictConfig, command: str) -> None:
    """Refuse top-level keys that nothing reads: `+key=` may only extend a group."""
    known = list_config_groups()
    for name in {"train", command}:
        defaults = OmegaConf.load(get_config_dir() / f"{name}.yaml")
        assert isinstance(defaults, DictConfig)
        known += map(str, defaults)
    for key in map(str, config):
        if key not in known:
            raise UsageError(f"no key or group {key!r}{suggest_name(key, known)}")


def check_value_types(composed: ComposedConfig) -> None:
    """Refuse values of another type than the option's default, wherever they were written.

    Refuse keys that the option does not have, too, except arguments of a `_target_`, which checks
    them itself.
    """
    groups = list_config_groups()
    choices = composed.composition.choices
    options = {g: o for g, o in choices.items() if g in groups and g != "experiment"}
    overrides = [f"{group}={option or 'null'}" for group, option in options.items()]
    overrides += [o for o in composed.composition.overrides if _grants_trust(o)]
    defaults = compose_config(overrides, composed.composition.command).config
    for key in iter_keys(defaults):
        value, default = (_select(config, key) for config in (composed.config, defaults))
        check_kind(key, value, default)
    for key in iter_keys(composed.config):
        parent, _, name = key.rpartition(".")
        owner = _select(defaults, parent) if parent else None
        if isinstance(owner, DictConfig) and not {name, "_target_"} & set(owner):
            raise UsageError(f"no key {key!r}{suggest_name(name, list(map(str, owner)))}")
        value = _select(composed.config, key)
        if not isinstance(value, DictConfig):  # its keys are looked at, too
            for leaf in iter_leaves(value):
                check_size(key, leaf)


def check_kind(key: str, value: Any, default: Any) -> None:
    """Refuse a value of another type than the default."""
    if key not in MIXED_TYPES and default is not None and not is_same_kind(value, default):
        raise UsageError(f"{key} must be {describe_kind(default, key)}, got {shorten(value)}")


def iter_leaves(value: Any) -> Iterator[Any]:
    """Yield a value, or those in a list or mapping at any depth."""
    if isinstance(value, ListConfig):
        for part in value:
            yield from iter_leaves(part)
    elif isinstance(value, DictConfig):
        for part in value.values():
            yield from iter_leaves(part)
    else:
        yield value


def check_loggers(composed: ComposedConfig) -> None:
    """Refuse loggers that a file, not the command line, lets send a run away or write elsewhere."""
    loggers = _select(composed.config, "logger")
    if not isinstance(loggers, DictConfig):
        return
    for key in iter_keys(loggers):
        value, name = _select(loggers, key), key.rpartition(".")[2]
        sends = (name in RECEIVERS and value is not None) or (name, value) == SENDS
        elsewhere = isinstance(value, str) and name not in RECEIVERS and _leaves_folder(value)
        if (sends or elsewhere) and not composed.composition.is_overridden(f"logger.{key}"):
            what = "sends the run elsewhere" if sends else "is not in the run folder"
            raise UsageError(
                f"logger.{key}={value} {what}: only the command line may set it, a file may not"
            )


def _grants_trust(override: str) -> bool:
    return override.lstrip("+").startswith("allow_targets=")


def _leaves_folder(name: str) -> bool:
    """Return whether a path is not in a folder, or is another one once variables are filled in."""
    leaves = name.startswith(("/", "\\", "~")) or ".." in re.split(r"[/\\]", name)
    return leaves or "$" in name or "%" in name


def check_missing_keys(composed: ComposedConfig, config_dirs: Sequence[Any]) -> None:
    """Name every mandatory key without a value in one line; describe a single one."""
    config, command = composed.config, composed.composition.command
    keys = _list_missing(config)
    if command in DATASET_COMMANDS and isinstance(config.get("data"), DictConfig):
        keys += [f"data.{key}" for key in _list_missing(config.data)]
    if not keys:
        return
    *others, last = keys
    names = f"{', '.join(others)} and {last}" if others else last
    message = f"{names} must be given: {' '.join(f'{key}=...' for key in keys)}"
    if not others:
        comment = collect_comments(composed.composition, config_dirs).get(last)
        message += f" ({comment})" if comment else ""
    raise UsageError(message)


def list_known_keys(command: str, args: Sequence[str], bad_key: str) -> Iterator[str]:
    """Yield every key and group of the config as the other overrides make it."""
    groups = list_config_groups()
    yield from groups
    chosen = [a for a in args if a.split("=")[0] in groups or _grants_trust(a)]
    choices = [a for a in chosen if a.split("=")[0] != bad_key]
    GlobalHydra.instance().clear()
    try:
        composed = compose_config(choices, command)
    except (HydraException, UsageError):  # another override is wrong, too
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


def is_same_kind(value: Any, default: Any) -> bool:
    """Return whether a value may replace a default.

    >>> is_same_kind([3, 3, 1], 3), is_same_kind(2, 0.5), is_same_kind(1.5, 1)
    (True, True, False)
    """
    if isinstance(default, DictConfig) or isinstance(value, DictConfig):
        return isinstance(value, DictConfig) and isinstance(default, DictConfig)
    if isinstance(default, bool):
        return isinstance(value, bool)
    if value is None or isinstance(value, ListConfig):
        return True
    if isinstance(value, bool) or isinstance(default, ListConfig):
        return False
    if isinstance(default, str):
        return True
    if isinstance(value, str):
        return False
    if isinstance(value, float) and isinstance(default, int):
        return value.is_integer() and abs(value) <= MAX_INT
    return True


def describe_kind(default: Any, key: str) -> str:
    """Say which values may replace a default.

    >>> describe_kind(True, "tf32"), describe_kind(8, "model.width")
    ('true or false', 'an int as in model.width=8')
    """
    if isinstance(default, DictConfig):
        return "a mapping of keys"
    if isinstance(default, str):
        return f"text as in {key}={default}"
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, ListConfig):
        return f"a list as in {key}={default}"
    return f"{'an int' if isinstance(default, int) else 'a number'} as in {key}={default}"


def _select(config: DictConfig, key: str) -> Any:
    """Return a value; None if there is none, or if it refers to a missing one."""
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return None


def _list_missing(node: DictConfig) -> list[str]:
    return [str(key) for key in node if OmegaConf.is_missing(node, str(key))]
