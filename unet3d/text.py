"""Format names, counts and tables for people to read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def format_columns(rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Align rows in columns: the first `left` columns to the left, the others to the right.

    >>> print(format_columns([("layer", "MiB"), ("head", "7")]))
    layer  MiB
    head     7
    """
    table = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def flatten_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested mapping with dotted keys.

    >>> dict(flatten_keys({"model": {"depth": 3, "kernel_size": [1, 3, 3]}}))
    {'model.depth': 3, 'model.kernel_size': [1, 3, 3]}
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def join_first(names: Sequence[str], limit: int = 5) -> str:
    """Join the first names and count the others.

    >>> join_first(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> pluralize(1, "warning"), pluralize(3, "warning")
    ('1 warning', '3 warnings')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
