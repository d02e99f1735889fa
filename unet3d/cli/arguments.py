"""Prepare the arguments of a command line for Hydra."""

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser  # Hydra 1.3.8; the only list of its flags

from unet3d.config.compose import find_local_config_dir
from unet3d.config.validate import list_known_keys
from unet3d.errors import UsageError


def parse_config_dirs(args: Sequence[str]) -> list[Path]:
    """Return the folders that --config-dir names.

    >>> parse_config_dirs(["--config-dir", "a", "--config-dir=b"])
    [PosixPath('a'), PosixPath('b')]
    """
    flags = ("--config-dir", "-cd")
    separate = [after for arg, after in pairwise(args) if arg in flags]
    joined = [arg.partition("=")[2] for arg in args if arg.startswith("--config-dir=")]
    return [Path(folder) for folder in (*separate, *joined)]


def find_user_config_dirs(args: Sequence[str]) -> list[Path]:
    """Return folders with the user's options: --config-dir, else conf/ in the working folder."""
    return parse_config_dirs(args) or find_local_config_dir()


def check_flags(command: str, args: Sequence[str]) -> None:
    """Refuse flags that Hydra does not have, and flags without the value that they need."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise UsageError(f"{message} (unet3d {command} --help)")

    parser.error = refuse
    _, unknown = parser.parse_known_args(list(args))
    if not unknown:
        return
    flag, _, value = unknown[0].partition("=")
    near = get_close_matches(flag, parser._option_string_actions, n=1, cutoff=0.8)
    if near:
        raise UsageError(f"unknown flag {flag}; did you mean {near[0]}?")
    after = args[args.index(unknown[0]) + 1 :][:1]
    if not value and after and not after[0].startswith("-") and "=" not in after[0]:
        value = after[0]
    name = flag.lstrip("-").replace("-", "_")
    known = list_known_keys(command, (), name)
    keys = [key for key in known if key == name or key.endswith(f".{name}")]
    example = f", as in {keys[0]}={value or '...'}" if len(set(keys)) == 1 else ""
    raise UsageError(
        f"unknown flag {flag}; settings are written key=value{example} (unet3d {command} --help "
        "lists them)"
    )
