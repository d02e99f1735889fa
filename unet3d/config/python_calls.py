"""Compose the config of a command for a call from Python, as the command line would."""

from collections.abc import Sequence
from pathlib import Path

from hydra import initialize_config_dir

from unet3d.config.compose import (
    ComposedConfig,
    compose_with_folder,
    find_local_config_dir,
    get_config_dir,
)
from unet3d.config.error_messages import CONFIG_ERRORS, format_config_error
from unet3d.config.overrides import make_search_path, quote_override
from unet3d.config.validate import check_config
from unet3d.errors import UsageError


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
    try:
        with initialize_config_dir(str(get_config_dir()), version_base="1.3"):
            composed, folder = compose_with_folder([*make_search_path(user_dirs), *args], command)
            check_config(composed, user_dirs)
    except CONFIG_ERRORS as error:
        raise UsageError(format_config_error(error, command, args)) from error
    return composed, folder
