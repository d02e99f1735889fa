"""Protect overrides from Hydra's grammar."""

import re
from collections.abc import Sequence
from pathlib import Path

PATH_KEYS = (
    *("data.root", "data.cache", "data.splits", "data.group_by"),
    *("hydra.run.dir", "hydra.sweep.dir"),
    *("checkpoint", "resume", "init_from", "input", "output", "predictions", "references"),
    *("images", "root", "url", "md5", "task", "figure", "report", "image", "group_by"),
)
"""Keys whose values are paths or patterns: spaces, commas, `=` and parentheses are allowed."""

LIST_KEYS = ("checkpoint", "predictions")
"""The keys among these whose values may be lists, as text."""

HOME = re.compile(r"(^|[\[,:'\"])~(?=/|$)")
"""The `~` of a path, or of a path in a list: shells leave it after `=`, and Hydra refuses it."""


def quote_override(override: str, *, sweep: bool) -> str:
    """Protect a path from Hydra's grammar; in a sweep a comma still separates values.

    >>> quote_override("data.root=/scans/my data (1)", sweep=False)
    "data.root='/scans/my data (1)'"
    """
    key, equals, value = override.partition("=")
    if "~" in value:
        value = HOME.sub(lambda match: f"{match[1]}{Path('~').expanduser()}", value)
        override = f"{key}={value}"
    is_path = key.lstrip("+") in PATH_KEYS and equals
    if not is_path or value in ("", "null", "true", "false") or value[0] in "'\"":
        return override
    if value[0] + value[-1] in ("{}", "[]") and key.lstrip("+") not in LIST_KEYS:
        return override  # a mapping or a list, which the command refuses
    if sweep and "," in value:
        return override
    # Hydra reads backslashes as escapes before a quote only, also before the one that we add.
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", value).replace("'", "\\'")
    return f"{key}='{escaped}'"


def make_search_path(folders: Sequence[Path]) -> list[str]:
    r"""Return the override with which Hydra finds options in these folders, if there are any.

    >>> print(*make_search_path([Path("/it's/conf")]))
    hydra.searchpath=['file:///it\'s/conf']
    """
    urls = [f"file://{folder.resolve()}".replace("'", "\\'") for folder in folders]
    return ["hydra.searchpath=[" + ",".join(f"'{url}'" for url in urls) + "]"] if urls else []
