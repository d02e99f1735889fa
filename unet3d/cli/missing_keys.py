"""Refuse a command whose mandatory keys are missing before anything heavy is imported for it."""

from omegaconf import DictConfig, OmegaConf

from unet3d.cli.app import find_user_config_dirs
from unet3d.cli.help import collect_comments
from unet3d.config.compose import ComposedConfig, get_config_dir
from unet3d.errors import UsageError

READ_DATA = ("check", "plan", "train")
"""Commands that read a data set: what their `data` group lacks must be given, too."""


def check_missing_keys(request: ComposedConfig) -> None:
    """Name every mandatory key without a value in one line; of a single one say what it is."""
    keys = list_missing_keys(request.config)
    if request.verb in READ_DATA and isinstance(request.config.get("data"), DictConfig):
        keys += [f"data.{key}" for key in list_missing_keys(request.config.data)]
    if not keys:
        return
    *others, last = keys
    names = f"{', '.join(others)} and {last}" if others else last
    said = f"{names} must be given: {' '.join(f'{key}=...' for key in keys)}"
    if not others:
        about = collect_comments(
            request.verb, request, [get_config_dir(), *find_user_config_dirs([])]
        ).get(last)
        said += f" ({about})" if about else ""
    raise UsageError(said)


def list_missing_keys(node: DictConfig) -> list[str]:
    """The keys of this node alone whose value is ???, in their order."""
    return [str(key) for key in node if OmegaConf.is_missing(node, str(key))]
