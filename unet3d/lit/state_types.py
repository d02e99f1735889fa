"""Say what the states in a checkpoint look like, and compare what was read with it."""

from collections.abc import Mapping
from math import isfinite
from types import UnionType
from typing import Any, get_args, get_origin

from torch import Tensor

MAX_COUNT = 2**53
MAX_INT = 2**1000


def matches(value: Any, expected: Any) -> bool:
    """Return whether a value has a type; ints count something.

    A function says it itself; a dict lists keys, or has `str` for any; a tuple lists choices.

    >>> matches({"a": [(1, 2.5)]}, {"a": list[tuple[int, float]]}), matches([True], list[int])
    (True, False)
    """
    kind, parts = get_origin(expected), get_args(expected)
    if isinstance(expected, dict):
        if expected.keys() == {str} and isinstance(value, dict):
            expected = dict.fromkeys(value, expected[str])
        return (
            isinstance(value, dict)
            and all(isinstance(key, str) for key in value)
            and value.keys() == expected.keys()
            and all(matches(value[key], expected[key]) for key in expected)
        )
    if isinstance(expected, tuple):
        return any(matches(value, choice) for choice in expected)
    if kind is UnionType:
        return any(matches(value, part) for part in parts)
    if kind is list:
        return isinstance(value, list) and all(matches(part, parts[0]) for part in value)
    if kind is tuple:
        same = isinstance(value, list | tuple) and len(value) == len(parts)
        return same and all(map(matches, value, parts))
    if not isinstance(expected, type):
        return expected(value)
    if expected is int:
        return is_count(value)
    return is_number(value) if expected is float else type(value) is expected


def is_alike(value: Any, own: Any) -> bool:
    """Return whether a value has the same keys, lengths and kinds of numbers as another.

    >>> is_alike({"a": (0, 1.5)}, {"a": (0.5, 2)}), is_alike({"a": 1}, {"a": True})
    (True, False)
    """
    if isinstance(own, Mapping):
        same = isinstance(value, Mapping) and value.keys() == own.keys()
        return same and all(is_alike(value[key], own[key]) for key in own)
    if isinstance(own, list | tuple):
        same = isinstance(value, list | tuple) and len(value) == len(own)
        return same and all(map(is_alike, value, own))
    if isinstance(own, Tensor) or isinstance(value, Tensor):
        numbers = [own, value]
        return all(
            is_number(n) or (isinstance(n, Tensor) and n.dim() == 0 and n.is_floating_point())
            for n in numbers
        )
    if is_number(own):
        return is_number(value) and (isfinite(value) or not isfinite(own))
    return type(value) is type(own)


def is_equal(saved: Any, own: Any) -> bool:
    """Return whether values are the same numbers of the same kinds, or the same names."""
    if isinstance(saved, Tensor) or isinstance(own, Tensor):
        return isinstance(saved, Tensor) and isinstance(own, Tensor) and saved.equal(own)
    if isinstance(own, list | tuple):
        return is_alike(saved, own) and all(map(is_equal, saved, own))
    return is_alike(saved, own) and saved == own


def is_number(value: Any) -> bool:
    """Return whether a value is a float, which may be NaN, or an int that a float can hold."""
    return isinstance(value, float) or (type(value) is int and abs(value) < MAX_INT)


def is_duration(value: Any) -> bool:
    """Return whether a value is a time that has passed, in seconds."""
    return is_number(value) and isfinite(value) and value >= 0


def is_count(value: Any) -> bool:
    """Return whether a value is a number of something."""
    return type(value) is int and 0 <= value < MAX_COUNT


def is_positive(value: Any) -> bool:
    """Return whether a value is a number of something that there is."""
    return is_count(value) and value > 0


def shorten(value: Any) -> str:
    """Return a value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of {list(value.shape)}"
    text = " ".join(repr(value)[:200].split())
    return text if len(text) < 60 else f"{text[:60]}..."
