"""Names of rows in the documents, for the names under which results were recorded."""

import re
from collections.abc import Iterable
from typing import TypeVar

RENAMED = {"none": "fused"}
"""Old names of checkpointing strategies, and their names today."""

Row = TypeVar("Row")


def get_current_name(name: str, recorded: Iterable[str]) -> str:
    """Return the name of a row in the documents, given the names of all rows recorded with it.

    Where `fused` was recorded too, `none` is the strategy that has this name today.

    >>> get_current_name("ours, none", ["ours, none", "ours, lean"])
    'unet3d, fused'
    >>> get_current_name("checkpointing=none", ["checkpointing=fused", "checkpointing=none"])
    'checkpointing=none'
    >>> get_current_name("small, as written", [])
    'small, plain modules'
    """
    strategies = {re.split(", |=", other)[-1] for other in recorded}
    for old, new in RENAMED.items():
        if new not in strategies:
            name = re.sub(rf"(?:^|(?<=, )|(?<=checkpointing=)){old}$", new, name)
    return re.sub(r"^ours\b", "unet3d", re.sub(r"\bas written\b", "plain modules", name))


def use_current_names(rows: dict[str, Row]) -> dict[str, Row]:
    """Return rows under their names in the documents."""
    return {get_current_name(name, rows): row for name, row in rows.items()}
