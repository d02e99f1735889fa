"""Say in one line what is wrong with a config, as Hydra and OmegaConf found it."""

import re
from collections.abc import Sequence

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from unet3d.config.compose import list_options
from unet3d.config.validate import find_option_with, list_known_keys, suggest_name

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)


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
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key or 'a value'} must be given: {error.full_key}=..."
    if isinstance(error, OverrideParseException):
        return f"cannot parse {error.override!r}: quote special characters, as in key=\"'a, b'\""
    text = re.sub(r"\s+full_key:.*", "", str(error), flags=re.DOTALL)  # OmegaConf's details
    key = getattr(error, "full_key", None)
    return " ".join(f"{key}: {text}".split() if key else text.split())
