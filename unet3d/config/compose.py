"""Compose a command's config with Hydra, and protect overrides from its grammar."""

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf, open_dict

from unet3d.config.names import EARLIER_KEYS, rename_keys, rename_option
from unet3d.types import find_precision

Config = DictConfig
"""The type of a composed config, for modules that pass it on."""

PATH_KEYS = (
    *("data.root", "data.cache", "data.splits", "data.group_by"),
    *("hydra.run.dir", "hydra.sweep.dir"),
    *("checkpoint", "resume", "init_from", "input", "output", "predictions", "references"),
    *("images", "root", "url", "md5", "task", "figure", "report", "image", "group_by"),
)
"""Keys whose values are paths or patterns: spaces, commas, `=` and parentheses are allowed."""

MAPPING_KEYS = ("data.regions", "data.label_values", "data.annotated", "lr_factors")
"""Keys whose value may be a mapping of names that the user chooses."""

HOME = re.compile(r"(^|[\[,:'\"])~(?=/|$)")
"""The `~` of a path, or of a path in a list: shells leave it after `=`, and Hydra refuses it."""

OWN_PROVIDERS = ("hydra", "main", "schema")
"""Who provides configs to Hydra, but for users."""

PLAIN_PATH = re.compile(r"(?!(?i:nan|inf)$)(\.{0,2}/|[A-Za-z_])[\w./-]*")
"""A path that Hydra's grammar reads as it is."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """How a config was composed: the command, its options and its overrides."""

    command: str
    choices: Mapping[str, str]  # the selected option of each group
    overrides: tuple[str, ...] = ()  # as typed
    sweeping: bool = False  # whether this is one job of a sweep
    folder: Path = Path()  # of the run
    folder_has_time: bool = False  # whether the name of the run's folder is the time of its start
    config_dirs: tuple[Path, ...] = ()  # with options of the user's

    def is_overridden(self, key: str) -> bool:
        """Return whether the command line sets this key or a key below it."""
        keys = [o.lstrip("+~").split("=")[0].split("@")[0] for o in self.overrides]
        return any(k == key or k.startswith(key + ".") for k in keys)

    def format_command(self, *more: str) -> str:
        """Return the command line, as a shell takes it, with more overrides at its end.

        >>> words = ("a=[1,2]", "data.root=x/y", "b='1'")
        >>> print(Composition(command="train", choices={}, overrides=words).format_command("c=d"))
        unet3d train 'a=[1,2]' data.root=x/y 'b='"'"'1'"'"'' c=d
        """
        words = [word for word in self.overrides if not word.startswith("hydra.")]
        return shlex.join(["unet3d", self.command, *words, *more])


@dataclass(frozen=True, kw_only=True)
class ComposedConfig:
    """A config and how it was composed."""

    config: DictConfig
    composition: Composition


def get_config_dir() -> Path:
    """Return the folder of the configs: in the package if installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(p for p in (package / "conf", package.parent / "conf") if p.is_dir())


def find_user_config_dirs(config_dir: str | Path | None) -> list[Path]:
    """Return the folder of the user's options: the given one, else ./conf if there is one."""
    if config_dir is not None:
        return [Path(config_dir).absolute()]
    local = Path.cwd() / "conf"
    return [local] if local.is_dir() and local != get_config_dir() else []


def list_config_groups() -> list[str]:
    """Return the folders of the configs: the groups whose options a user selects."""
    return [p.name for p in get_config_dir().iterdir() if p.is_dir()]


def list_options(group: str) -> list[str]:
    """Return the names of a group's options."""
    return sorted(p.stem for p in (get_config_dir() / group).glob("[!_]*.yaml"))


def compose_config(
    overrides: Sequence[str], command: str, user_dirs: Sequence[Path] = ()
) -> ComposedConfig:
    """Compose a command's config, within a running Hydra or without one.

    `user_dirs` has a folder with the user's options, or nothing.
    """
    urls = [f"hydra.searchpath=[{quote(f'file://{path.resolve()}')}]" for path in user_dirs]
    running, folder = GlobalHydra.instance().is_initialized(), str(get_config_dir())
    with nullcontext() if running else initialize_config_dir(folder, version_base="1.3"):
        config = compose(command, overrides=[*urls, *overrides], return_hydra_config=True)
    composed = describe_composition(command, config, config.hydra, overrides)
    with open_dict(config):
        del config["hydra"]
    return composed


def describe_composition(
    command: str,
    config: DictConfig,
    hydra: DictConfig,
    overrides: Sequence[str],
    *,
    sweeping: bool = False,
) -> ComposedConfig:
    """Return a config with the present names of its keys, and how Hydra composed it."""
    # The folders of --config-dir and of hydra.searchpath, also in packages.
    sources = [s for s in hydra.runtime.config_sources if s.provider not in OWN_PROVIDERS]
    dirs = [Path(s.path if s.schema == "file" else str(files(s.path))) for s in sources]
    composition = Composition(
        command=command,
        choices=read_choices(hydra.runtime.choices, overrides, [*dirs, get_config_dir()]),
        overrides=tuple(overrides),
        sweeping=sweeping,
        folder=Path(hydra.run.dir),
        folder_has_time=not sweeping and "${now:" in OmegaConf.to_yaml(hydra.run),
        config_dirs=tuple(dirs),
    )
    with open_dict(config):
        rename_keys(config, announces=True)
    return ComposedConfig(config=config, composition=composition)


def read_choices(
    choices: Mapping[str, str], overrides: Sequence[str], folders: Sequence[Path]
) -> dict[str, str]:
    """Return the option of each group; Hydra leaves out groups with several, as in [a,b]."""
    groups = list_config_groups()
    lists = {} if choices.keys() >= {*groups} else find_lists(choices, folders)
    lists |= dict(override.split("=", 1) for override in overrides if "=[" in override)
    several = {group: lists[group] for group in groups if group in lists}
    return {g: rename_option(g, str(option)) for g, option in {**choices, **several}.items()}


def find_lists(choices: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """Return the groups for which chosen files, such as experiments, select several options."""
    lists = {}
    names = [f"{group}/{option}.yaml" for group, option in choices.items() if "/" not in group]
    for file in filter(Path.is_file, (folder / name for folder in folders for name in names)):
        for entry in read_defaults(file):
            for group, options in entry.items() if isinstance(entry, dict) else ():
                if isinstance(options, list):
                    lists[group.split("/")[-1]] = f"[{','.join(map(str, options))}]"
    return lists


def read_defaults(file: Path) -> list[Any]:
    """Return the entries of a file's defaults list."""
    content = yaml.safe_load(file.read_text("utf-8"))
    return content.get("defaults", []) if isinstance(content, dict) else []


def split_options(option: str) -> list[str]:
    """Return the options of a choice.

    >>> split_options("[tensorboard,csv]"), split_options("csv")
    (['tensorboard', 'csv'], ['csv'])
    """
    return [name.strip() for name in option.strip("[]").split(",")]


def replace_values(composed: ComposedConfig, values: Mapping[str, Any]) -> ComposedConfig:
    """Return the config with other values or groups, by dotted key."""
    config = composed.config.copy()
    for key, value in values.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    return ComposedConfig(config=config, composition=composed.composition)


def to_plain(value: Any) -> Any:
    """Return a value or a node as plain Python; a missing value stays `???`."""
    is_node = isinstance(value, DictConfig | ListConfig)
    return expand_home(OmegaConf.to_container(value, resolve=True) if is_node else value)


def resolve_config(config: DictConfig) -> dict[str, Any]:
    """Return a config as plain values; the dataset's layout only if data.root is given."""
    if OmegaConf.is_missing(config.data, "root"):
        config = deepcopy(config)
        config.data.layout = MISSING
    values = {str(key): value for key, value in to_plain(config).items()}
    precision = find_precision(values["precision"])
    if precision is not None:  # 16-mixed is 16
        values["precision"] = int(precision) if precision.isdecimal() else precision
    return values


def to_yaml_literal(value: Any) -> str:
    """Format a value as YAML and the command line have it.

    >>> to_yaml_literal(True), to_yaml_literal(None), to_yaml_literal([1, 0.5])
    ('true', 'null', '[1,0.5]')
    >>> to_yaml_literal({"a": 1}), to_yaml_literal("")
    ('{a:1}', "''")
    """
    if isinstance(value, list | tuple | ListConfig):
        return f"[{','.join(to_yaml_literal(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{to_yaml_literal(v)}' for k, v in value.items())}}}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value) or "''"


def format_overrides(values: Mapping[str, Any]) -> str:
    """Format values by key as words of a command line.

    >>> format_overrides({"precision": "bf16", "data.patch_size": (64, 64, 32)})
    'precision=bf16 data.patch_size=[64,64,32]'
    """
    return " ".join(f"{key}={to_yaml_literal(value)}" for key, value in values.items())


def expand_home(value: Any) -> Any:
    """Return a value with the home folder for the `~` of paths, at any depth."""
    if isinstance(value, dict):
        return {key: expand_home(part) for key, part in value.items()}
    if isinstance(value, list):
        return [expand_home(part) for part in value]
    is_in_home = isinstance(value, str) and (value == "~" or value.startswith("~/"))
    return str(Path(value).expanduser()) if is_in_home else value


def quote_override(override: str, *, sweep: bool) -> str:
    """Protect a path from Hydra's grammar; in a sweep a comma still separates values.

    >>> quote_override("data.root=/scans/my data (1)", sweep=False)
    "data.root='/scans/my data (1)'"
    """
    key, _, value = override.partition("=")
    if "~" in value:
        value = HOME.sub(lambda match: f"{match[1]}{Path('~').expanduser()}", value)
        override = f"{key}={value}"
    if key in [f"loss.{earlier}" for earlier in EARLIER_KEYS]:  # rename_keys renames it
        return f"++{override}"
    if key.lstrip("+") not in PATH_KEYS or PLAIN_PATH.fullmatch(value) or value[:1] in "'\"":
        return override
    if value[0] + value[-1] in ("{}", "[]") or (sweep and "," in value):
        return override
    return f"{key}={quote(value)}"


def protect_overrides(overrides: Sequence[str], *, sweep: bool) -> list[str]:
    """Return words of the command line as Hydra reads them: paths quoted, mappings replaced."""
    quoted = [quote_override(override, sweep=sweep) for override in overrides]
    return [word for override in quoted for word in replace_mapping(override)]


def replace_mapping(override: str) -> list[str]:
    """Let a mapping replace that of a file, which Hydra would merge it with.

    >>> replace_mapping("data.regions={core:[2]}"), replace_mapping("data.regions=null")
    (['data.regions=null', '++data.regions={core:[2]}'], ['data.regions=null'])
    """
    key, _, value = override.partition("=")
    is_replaced = key in MAPPING_KEYS and value.startswith("{")
    return [f"{key}=null", f"++{override}"] if is_replaced else [override]


def parse_value(text: str) -> Any:
    """Return the value of an override, as Hydra reads it.

    >>> parse_value("{left:1}"), parse_value("'a, b'"), parse_value("[no,1e-3]")
    ({'left': 1}, 'a, b', ['no', 0.001])
    """
    return OverridesParser.create().parse_override(f"key={text}").value()


def quote(text: str) -> str:
    r"""Return a text that Hydra's grammar reads as it is.

    >>> print(quote("it's"))
    'it\'s'
    """
    # Hydra reads backslashes as escapes before a quote only, also before the one that we add.
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", text).replace("'", "\\'")
    return f"'{escaped}'"
