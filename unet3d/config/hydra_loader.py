"""Let Hydra compose only what may be composed: each file is checked as it is read, and the result.

Hydra configures its logging, callbacks and launchers from a config before it calls us, for each job
of a sweep. So the checks are in its loader. The private names are those of Hydra 1.3.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra._internal import hydra as hydra_internals
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from unet3d.config.composed_check import check_composed
from unet3d.config.config_dirs import get_config_dir
from unet3d.config.user_configs import check_file
from unet3d.config.values import check_size, is_text, shorten
from unet3d.errors import UsageError, summarize_error

COMMAND_LINE_KEYS = (
    *("hydra.run.", "hydra.sweep.", "hydra.launcher.", "hydra.sweeper.", "hydra.verbose"),
    "hydra.mode",
    *("hydra.searchpath", "hydra/launcher", "hydra/sweeper"),
)
"""Keys of Hydra that a command line may set; others call code or set variables before ours runs."""

FOLDER_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
"""The keys among these that are paths: Hydra would make a folder of any value."""

DEFAULT_CHOICES = ("default", "basic", "stdout", "None")
"""Options of Hydra's own groups that its defaults and our commands choose."""


@contextmanager
def checked_composition() -> Generator[None]:
    """Let Hydra load configs with our loader."""
    original = hydra_internals.ConfigLoaderImpl
    hydra_internals.ConfigLoaderImpl = CheckedLoader  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        hydra_internals.ConfigLoaderImpl = original


class CheckedRepository(ConfigRepository):
    """Check files before they are read."""

    def load_config(self, config_path: str) -> Any:
        """Load a file; refuse one that is not a plain mapping."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.scheme() != "file":
            return super().load_config(config_path)
        file = Path(source.path) / source._normalize_file_name(config_path)
        check_file(file)
        try:
            result = super().load_config(config_path)
        except (yaml.YAMLError, RecursionError, OSError, UnicodeError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"{file} cannot be read as YAML: {reason}") from None
        if result is not None and not isinstance(result.config, DictConfig):
            raise UsageError(f"{file} must hold keys with values, as in data: {{batch_size: 2}}")
        return result


class CheckedLoader(ConfigLoaderImpl):
    """Refuse files that configure Hydra or grant trust, and check what was composed."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = CheckedRepository(config_search_path=config_search_path)
        self.command = ""
        self.parents: list[tuple[str, str]] = []  # of configs in packages that set `hydra`

    def load_configuration(
        self, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
    ) -> DictConfig:
        """Compose; also called for each job of a sweep."""
        check_overrides(overrides)
        self.command = config_name or ""
        self.parents.clear()
        try:
            config = super().load_configuration(config_name, overrides, *args, **kwargs)
        except RecursionError:
            raise UsageError("defaults: an option lists itself, or one that lists it") from None
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, UsageError):
            raise
        except Exception as error:  # Hydra's, of files and words that it does not expect
            raise UsageError(f"the config cannot be composed: {summarize_error(error)}") from error
        given = {o.key_or_group for o in OverridesParser.create().parse_overrides(overrides)}
        for group, option in config.hydra.runtime.choices.items():
            is_default = str(option) in DEFAULT_CHOICES and "@" not in group
            if group.startswith("hydra/") and group not in given and not is_default:
                raise UsageError(
                    f"a config chooses {group}={option}: only the command line may choose it"
                )
        self._check_parents()
        check_composed(config)
        return config

    def _load_single_config(self, default: Any, repo: Any) -> Any:
        try:
            result = super()._load_single_config(default, repo)
        except OmegaConfBaseException as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"{default.config_path}.yaml cannot be read: {reason}") from error
        is_file = str(result.path).startswith("file:")
        is_ours = result.path == f"file://{get_config_dir()}" and default.config_path in (
            "train",
            self.command,
        )
        if is_file and not is_ours:
            for key in ("hydra", "allow_targets"):
                if key in set(result.config):
                    value = result.config._get_node(key)
                    raise UsageError(describe_setting(default.config_path, key, value))
        elif not is_ours and "hydra" in result.config:
            self.parents.append((default.config_path, default.parent))
        return result

    def _check_parents(self) -> None:
        """Refuse a config of Hydra's that a file lists, not Hydra's own configs."""
        own = {"<root>", *(path for path, _ in self.parents)}
        for path, parent in self.parents:
            if parent not in own:
                raise UsageError(f"{parent}.yaml lists {path}: only the command line may choose it")


def describe_setting(file: str, key: str, value: Any) -> str:
    """Say what only the command line may set."""
    names = list(value.keys()) if isinstance(value, DictConfig) else []
    inner = f".{names[0]}" if names else ""
    return f"{file}.yaml sets {key}{inner}: only the command line may set it, a file may not"


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that configure Hydra otherwise than by folders, launchers and sweepers."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        key = key.partition("@")[0].strip()
        if not key.startswith(("hydra.", "hydra/")) and key != "hydra":
            continue
        if key in (*FOLDER_KEYS, "hydra.verbose"):
            check_hydra_value(key, OverridesParser.create().parse_override(override).value())
        imports = key == "hydra.searchpath" and "pkg://" in value
        calls = key.startswith(("hydra.launcher.", "hydra.sweeper.")) and "_target_" in override
        if imports or calls or not key.startswith(COMMAND_LINE_KEYS):
            raise UsageError(
                f"{key} cannot be set: of Hydra's keys, hydra.run, hydra.sweep, hydra.launcher and "
                "hydra.sweeper can"
            )


def check_hydra_value(key: str, value: Any) -> None:
    """Refuse a value that Hydra would make a folder of, or fail at."""
    check_size(key, value)
    if key in FOLDER_KEYS and not is_text(value):
        raise UsageError(f"{key} must be a path, got {shorten(value)}")
    if key == "hydra.verbose" and not isinstance(value, bool | str | list):
        raise UsageError(f"{key} must be true, false or names of loggers, got {shorten(value)}")
