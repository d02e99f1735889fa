"""Turn an error into one line on standard error and an exit code."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from errno import EACCES, ENOENT, ENOTDIR, EPERM, EROFS

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
from unet3d.data.findings import InvalidDatasetError
from unet3d.errors import DoesNotFitError, Interrupted, RunError, UsageError

EXIT_CODES: dict[type[BaseException], int] = {UsageError: 2, DoesNotFitError: 3, RunError: 4}

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)

PATH_ERRORS = (ENOENT, EACCES, EPERM, ENOTDIR, EROFS)


def run_with_error_handling(
    action: Callable[[], int],
    *,
    debug: bool,
    command: str = "train",
    args: Sequence[str] = (),
    sweeping: bool = False,
) -> int:
    """Call `action`; print an error as one line and return its exit code.

    Interrupting one job of a sweep interrupts the sweep.
    """
    try:
        return action()
    except (Interrupted, KeyboardInterrupt) as stop:
        if sweeping:
            raise
        if isinstance(stop, Interrupted):
            return stop.exit_code
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of `... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"unet3d: {format_error(error, command, args)}", file=sys.stderr)
        return get_exit_code(error)


def get_exit_code(error: Exception) -> int:
    """Return 2 for usage errors, 3 for out of memory, 4 for other errors."""
    if isinstance(error, CONFIG_ERRORS):
        return 2
    if isinstance(error, OSError) and error.errno in PATH_ERRORS:
        return 2
    if is_out_of_memory(error):
        return 3
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 4)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a GPU or the machine ran out of memory; torch is not imported for it."""
    is_known = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return is_known or "can't allocate memory" in str(error)


def format_error(error: Exception, command: str, args: Sequence[str]) -> str:
    """Say in one line what went wrong."""
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        # Hydra does not list the options of a group that is given several.
        options = [o for o in error.options or list_options(group) if not o.startswith("_")]
        hint = suggest_name(option, options)
        return f"no option {group}={option}{hint} Options: {', '.join(options)}."
    if isinstance(error, ConfigCompositionException):
        match = re.search(r"Could not override '([^']+)'", str(error))
        if match:
            key = match[1]
            option = find_option_with(key)
            if option is not None:
                return f"no key {key!r} here: it is one of {option}"
            known = [k for k in list_known_keys(command, args, key) if "._" not in k]
            return f"no key or group {key!r}{suggest_name(key, known)}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key or 'a value'} must be given: {error.full_key}=..."
    if isinstance(error, OverrideParseException):
        return f"cannot parse {error.override!r}: quote special characters, as in key=\"'a, b'\""
    if isinstance(error, DoesNotFitError | InvalidDatasetError):
        return str(error)  # a report of several lines
    if isinstance(error, UsageError | RunError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split()) or type(error).__name__
    if is_out_of_memory(error):
        return f"out of memory: {text}"
    if isinstance(error, CONFIG_ERRORS):
        return text
    return f"{type(error).__name__}: {text} (debug=true shows the traceback)"
