"""Format names, bytes, counts and tables for people to read."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MIB, GIB = 2**20, 2**30

MANY_CLASSES, NUM_WORST = 20, 5
"""With more than MANY_CLASSES, only the NUM_WORST classes with the lowest scores are shown."""


def escape_unprintable(text: str, keep: str = "") -> str:
    r"""Return text whose control characters, marks of direction and the like are escapes.

    A file name may hold any of them: a terminal would obey, and a browser would reorder the text.

    >>> print(escape_unprintable("a" + chr(27) + "[2J" + chr(0x202E) + "b"))
    a\x1b[2J\u202eb
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def escape_mathtext(text: str) -> str:
    r"""Return text that matplotlib draws as it is, where it would find a formula.

    >>> print(escape_mathtext("a$b$"))
    a\$b\$
    """
    return escape_unprintable(text, keep="\n").replace("$", r"\$")


def format_columns(rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Align rows in columns: the first `left` columns to the left, the others to the right.

    >>> print(format_columns([("layer", "MiB"), ("head", "7")]))
    layer  MiB
    head     7
    """
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        cells = list(map(str, column))
        width = max(map(len, cells))
        columns.append([c.ljust(width) if number < left else c.rjust(width) for c in cells])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def flatten_keys(
    config: Mapping[str, Any], prefix: str = "", *, whole: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested mapping with dotted keys; mappings named in `whole` are leaves.

    >>> dict(flatten_keys({"model": {"depth": 3, "kernel_size": [1, 3, 3]}}))
    {'model.depth': 3, 'model.kernel_size': [1, 3, 3]}
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in whole:
            yield from flatten_keys(value, f"{prefix}{key}.", whole=whole)
        else:
            yield f"{prefix}{key}", value


def join_first(names: Sequence[str], limit: int = 5) -> str:
    """Join the first names and count the others.

    >>> join_first(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    more = len(names) - limit
    return ", ".join(map(escape_unprintable, names[:limit])) + (
        f" and {more} more" if more > 0 else ""
    )


def select_worst(dice: Mapping[str, float]) -> list[str]:
    """Return the names of all classes or, of many, those of the lowest scores; NaN comes last.

    >>> select_worst({"a": 0.2, "b": 0.1})
    ['a', 'b']
    >>> select_worst({str(n): 1 - n / 100 for n in range(30)})
    ['29', '28', '27', '26', '25']
    """
    if len(dice) <= MANY_CLASSES:
        return list(dice)
    return sorted(dice, key=lambda name: (math.isnan(dice[name]), dice[name]))[:NUM_WORST]


def describe_classes(
    names: Sequence[str], regions: Mapping[str, Sequence[int]] | None = None
) -> str:
    """Name the classes, of many only the first, and the regions with their labels.

    >>> describe_classes(["background", "liver"])
    'classes background, liver'
    >>> describe_classes(["background", "edema", "core"], {"whole": (1, 2), "core": (2,)})
    'classes background, edema, core; regions whole [1, 2], core [2]'
    >>> describe_classes([f"bone {n}" for n in range(118)])
    '118 classes: bone 0, bone 1, bone 2, bone 3, bone 4 and 113 more'
    """
    unions = [f"{name} {list(labels)}" for name, labels in (regions or {}).items()]
    end = f"; regions {join_first(unions, 20)}" if unions else ""
    if len(names) > MANY_CLASSES:
        return f"{len(names)} classes: {join_first(names)}{end}"
    return f"classes {', '.join(names)}{end}"


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> pluralize(1, "warning"), pluralize(3, "warning")
    ('1 warning', '3 warnings')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_time(seconds: float) -> str:
    """Format a time in its two largest units; of seconds, with two digits.

    >>> format_time(0.3472), format_time(605), format_time(41_000), format_time(25_065_360)
    ('0.35 s', '10 min 5 s', '11 h 23 min', '290 d 2 h')
    """
    if seconds < 10:
        return f"{seconds:.2g} s"
    seconds = round(seconds)
    for size, unit, small, part in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // small} {part}"
    return f"{seconds} s"


def format_bytes(nbytes: float) -> str:
    """Return bytes as text in GiB or MiB.

    >>> format_bytes(3 * 2**29), format_bytes(2**24)
    ('1.5 GiB', '16 MiB')
    """
    return f"{nbytes / GIB:.1f} GiB" if abs(nbytes) >= GIB else f"{nbytes / MIB:.0f} MiB"
