"""Convert nested tuples to lists and back, for JSON and checkpoints."""

from typing import Any


def to_lists(value: Any) -> Any:
    """Convert nested tuples to lists."""
    return [to_lists(v) for v in value] if isinstance(value, tuple) else value


def to_tuples(value: Any) -> Any:
    """Convert nested lists to tuples."""
    return tuple(to_tuples(v) for v in value) if isinstance(value, list) else value
