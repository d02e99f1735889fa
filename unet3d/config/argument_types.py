"""Judge the arguments of a `_target_` by the annotations of its class.

Python does not: a list passes for true, and a mapping instead of a number fails late, or never.
"""

from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from unet3d.config.values import is_number, shorten
from unet3d.errors import UsageError

NAMES: dict[Any, str] = {
    **{bool: "true or false", int: "an int", float: "a number", str: "text"},
    **{Path: "text", NoneType: "null"},
}
"""What a message calls the types that a config can hold."""


def match_argument_types(target: Any, arguments: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return arguments, with numbers that stand for names as text; refuse other types."""
    matched, types = dict(arguments), get_argument_types(target)
    for name in arguments.keys() & types.keys():
        value, kind = arguments[name], types[name]
        if accepts(kind, value):
            continue
        if not is_number(value) or not accepts(kind, str(value)):
            expected = " or ".join(dict.fromkeys(describe(kind)))
            raise UsageError(f"{key}.{name} must be {expected}, got {shorten(value)}")
        matched[name] = str(value)
    return matched


def get_argument_types(target: Any) -> dict[str, Any]:
    """Return the declared type of each parameter; none where they cannot be found."""
    try:
        parameters = signature(target).parameters.values()
        hints = get_type_hints(target.__init__ if isinstance(target, type) else target)
    except (NameError, TypeError, ValueError):  # imported for type checkers alone, or built in
        return {}
    return {
        p.name: hints[p.name] | None if p.default is None else hints[p.name]
        for p in parameters
        if p.name in hints and p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    }


def accepts(kind: Any, value: Any) -> bool:
    """Return whether a type may have a plain value; true for types that no config can hold.

    >>> accepts(float, 1), accepts(float, True), accepts(Sequence[int] | None, [1, 2])
    (True, False, True)
    >>> accepts(Literal["max", "min"], "mean"), accepts(bool, [1]), accepts(slice, [1])
    (False, False, True)
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(accepts(part, value) for part in parts)
    if origin is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if kind in (int, bool, NoneType):
        return type(value) is kind
    if kind is float:
        return is_number(value)
    if kind in (str, Path):
        return isinstance(value, str)
    if origin in (list, tuple, Sequence):
        return isinstance(value, list | tuple) and all(
            accepts(part, one) for one in value for part in parts[:1]
        )
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(accepts(parts[-1], one) for one in value.values())
    return True


def describe(kind: Any) -> Iterator[str]:
    """Yield the types that values may have.

    >>> " or ".join(describe(float | Sequence[int] | Literal["auto"] | None))
    'a number or a list of ints or auto or null'
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for part in parts:
            yield from describe(part)
    elif origin is Literal:
        yield ", ".join(map(str, parts))
    elif origin in (list, tuple, Sequence):
        plurals = {int: " of ints", float: " of numbers", str: " of names"}
        yield f"a list{plurals.get(parts[0] if parts else None, '')}"
    else:
        yield NAMES.get(kind, "a mapping of keys")
