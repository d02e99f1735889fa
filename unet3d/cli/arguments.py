"""Prepare the words of a command line for Hydra."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from unet3d.config.compose import get_config_dir

PATH_KEYS = (
    *("data.root", "data.cache", "data.splits", "data.group_by"),
    *("hydra.run.dir", "hydra.sweep.dir"),
    *("checkpoint", "resume", "init_from", "input", "output", "predictions", "references"),
    *("images", "root", "url", "md5", "task", "picture"),
)
"""Keys whose values are paths or patterns: spaces, commas, `=` and parentheses are allowed."""


def parse_config_dirs(words: Sequence[str]) -> list[Path]:
    """Return the folders that --config-dir names.

    >>> parse_config_dirs(["--config-dir", "a", "--config-dir=b"])
    [PosixPath('a'), PosixPath('b')]
    """
    flags = ("--config-dir", "-cd")
    separate = [after for word, after in pairwise(words) if word in flags]
    joined = [word.partition("=")[2] for word in words if word.startswith("--config-dir=")]
    return [Path(folder) for folder in (*separate, *joined)]


def find_user_config_dirs(words: Sequence[str]) -> list[Path]:
    """Return folders with the user's options: --config-dir, else conf/ in the working folder."""
    local = Path.cwd() / "conf"
    has_local = local.is_dir() and local != get_config_dir()
    return parse_config_dirs(words) or ([local] if has_local else [])


def quote_override(word: str, *, sweep: bool) -> str:
    """Protect a path from Hydra's grammar; in a sweep a comma still separates values.

    >>> quote_override("data.root=/scans/my data (1)", sweep=False)
    "data.root='/scans/my data (1)'"
    """
    key, equals, value = word.partition("=")
    is_path = key.lstrip("+") in PATH_KEYS and equals
    if not is_path or value in ("", "null") or value[0] in "'\"":
        return word
    if sweep and "," in value:
        return word
    escaped = value.replace("\\", "\\\\").replace("'", "\\'") if "'" in value else value
    return f"{key}='{escaped}'"
