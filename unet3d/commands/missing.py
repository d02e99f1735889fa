"""Refuse a command whose mandatory keys are missing before anything heavy is imported for it."""

from omegaconf import DictConfig, OmegaConf

from unet3d.build.request import Request, conf_folder
from unet3d.commands.help import comments
from unet3d.commands.run import own_folders
from unet3d.types import Misuse

READ_DATA = ("check", "plan", "train")
"""Commands that read a data set: what their `data` group lacks must be given, too."""


def refuse_missing(request: Request) -> None:
    """Name every mandatory key without a value in one line; of a single one say what it is."""
    keys = missing_keys(request.config)
    if request.verb in READ_DATA and isinstance(request.config.get("data"), DictConfig):
        keys += [f"data.{key}" for key in missing_keys(request.config.data)]
    if not keys:
        return
    *others, last = keys
    names = f"{', '.join(others)} and {last}" if others else last
    said = f"{names} must be given: {' '.join(f'{key}=...' for key in keys)}"
    if not others:
        about = comments(request.verb, request, [conf_folder(), *own_folders([])]).get(last)
        said += f" ({about})" if about else ""
    raise Misuse(said)


def missing_keys(node: DictConfig) -> list[str]:
    """The keys of this node alone whose value is ???, in their order."""
    return [str(key) for key in node if OmegaConf.is_missing(node, str(key))]
