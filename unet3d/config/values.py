"""Read single values of a config; an error names the key, what it must be and what was given."""

import re
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf

from unet3d.errors import UsageError
from unet3d.types import DEVICE, DEVICE_NAMES, Triple

KeyPath = tuple[Any, ...]
"""The keys and indices that lead to a value."""

MAX_VALUES = 10_000
"""Values of a config, counting those that a reference or an alias repeats."""

MAX_NUMBER = 1e38
"""Larger numbers are typing errors, and infinite in float32."""

MAX_INT = 2**31 - 1
"""Larger ints are typing errors, and overflow in libraries that keep them in 32 bits."""

MAX_ANY_INT = 2**32 - 1
"""The limit for options that check their ints themselves: seeds may have 32 bits."""

MAX_PROCESSES = 1024
"""Processes of a command on one machine."""

MAX_TEXT = 4096
"""Characters: no system has longer paths."""

MAX_SHOWN = 200
"""Characters of a value in a message."""

MAX_SECONDS = 10**9
"""The longest duration, 31 years: libraries keep them in milliseconds or nanoseconds."""


def read(config: DictConfig, key: str) -> Any:
    """Return a value as plain Python, with lists and mappings resolved."""
    value = OmegaConf.select(config, key)
    return to_plain(value) if isinstance(value, DictConfig | ListConfig) else expand_home(value)


def to_plain(node: DictConfig | ListConfig) -> Any:
    """Return a node as plain lists and dicts; a missing value stays `???`."""
    return expand_home(OmegaConf.to_container(node, resolve=True))


def expand_home(value: Any) -> Any:
    """Return a value with the home folder for the `~` of paths, at any depth."""
    if isinstance(value, dict):
        return {key: expand_home(part) for key, part in value.items()}
    if isinstance(value, list):
        return [expand_home(part) for part in value]
    is_in_home = isinstance(value, str) and (value == "~" or value.startswith("~/"))
    return str(Path(value).expanduser()) if is_in_home else value


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; true and false are not.

    >>> is_number(0.5), is_number(True), is_number(float("inf")), is_number("1")
    (True, False, False, False)
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < MAX_NUMBER and isfinite(value)


def is_text(value: Any) -> bool:
    """Return whether a value can be a name or a path: text, or a number that stands for it.

    >>> is_text("a b"), is_text(7), is_text(""), is_text(True), is_text(["a"])
    (True, True, False, False, False)
    """
    if isinstance(value, str):
        return 0 < len(value) <= MAX_TEXT and "\0" not in value
    return is_number(value)


def iter_texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the texts at any depth."""
    if isinstance(value, str):
        yield path, value
    pairs = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in value.items() if isinstance(value, dict) else pairs:
        yield from iter_texts(part, (*path, key))


def check_size(key: str, value: Any) -> None:
    """Refuse numbers and texts that no option takes."""
    if isinstance(value, str) and (len(value) > MAX_TEXT or "\0" in value):
        given = f"{len(value):,}" if len(value) > MAX_TEXT else "one with a NUL character"
        raise UsageError(f"{key} must be text of at most {MAX_TEXT:,} characters, got {given}")
    if type(value) is int and abs(value) > MAX_ANY_INT:
        given = value if abs(value) < MAX_NUMBER else f"an int of {value.bit_length()} bits"
        raise UsageError(f"{key} must be an int within {MAX_ANY_INT}, got {given}")
    if isinstance(value, float) and not is_number(value):
        raise UsageError(f"{key} must be a number within {MAX_NUMBER:.0e}, got {value}")


def read_bool(config: DictConfig, key: str) -> bool:
    """Read true or false."""
    value = read(config, key)
    if not isinstance(value, bool):
        raise UsageError(f"{key} must be true or false, got {shorten(value)}")
    return value


def read_int(config: DictConfig, key: str, *, minimum: int, maximum: int = MAX_INT) -> int:
    """Read an int of at least `minimum` and at most `maximum`."""
    value = read(config, key)
    if type(value) is not int or not minimum <= value <= maximum:
        is_large = type(value) is int and value > maximum
        bound = f"<= {maximum}" if is_large else f">= {minimum}"
        raise UsageError(f"{key} must be an int {bound}, got {shorten(value)}")
    return value


def read_optional_int(
    config: DictConfig, key: str, *, minimum: int, maximum: int = MAX_INT
) -> int | None:
    """Read an int of at least `minimum` and at most `maximum`, or null."""
    if read(config, key) is None:
        return None
    return read_int(config, key, minimum=minimum, maximum=maximum)


def read_float(
    config: DictConfig,
    key: str,
    *,
    minimum: float = 0.0,
    exclusive: bool = False,
    maximum: float = MAX_NUMBER,
) -> float:
    """Read a number of at least `minimum`, or above it, and at most `maximum`."""
    value = read(config, key)
    is_low = is_number(value) and (value < minimum or (exclusive and value == minimum))
    if not is_number(value) or is_low or value > maximum:
        bound = f"above {minimum:g}" if exclusive else f">= {minimum:g}"
        bound += "" if maximum == MAX_NUMBER else f" and <= {maximum:g}"
        raise UsageError(f"{key} must be a number {bound}, got {shorten(value)}")
    return float(value)


def read_choice(config: DictConfig, key: str, choices: Sequence[str]) -> str:
    """Read one of `choices`."""
    value = read(config, key)
    if value not in choices:
        raise UsageError(f"{key} must be one of {', '.join(choices)}, got {shorten(value)}")
    return value


def read_str(config: DictConfig, key: str) -> str:
    """Read text, which may be written as a number."""
    return _read_text(config, key, "text")


def read_optional_str(config: DictConfig, key: str) -> str | None:
    """Read text, or null."""
    return None if read(config, key) is None else _read_text(config, key, "text or null")


def read_path(config: DictConfig, key: str) -> Path:
    """Read a path."""
    return Path(_read_text(config, key, "a path"))


def read_optional_path(config: DictConfig, key: str) -> Path | None:
    """Read a path, or null."""
    return None if read(config, key) is None else Path(_read_text(config, key, "a path or null"))


def _read_text(config: DictConfig, key: str, expected: str) -> str:
    value = read(config, key)
    if not is_text(value):
        raise UsageError(f"{key} must be {expected}, got {shorten(value)}")
    return str(value)


def shorten(value: Any) -> str:
    """Return a value as Python writes it, or its beginning."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def read_devices(config: DictConfig, key: str) -> int | Literal["auto"]:
    """Read a number of processes, or auto."""
    value = read(config, key)
    if value != "auto" and (type(value) is not int or not 1 <= value <= MAX_PROCESSES):
        bound = f">= 1 and <= {MAX_PROCESSES}"
        raise UsageError(f"{key} must be auto or an int {bound}, got {value!r}")
    return value


def read_device(config: DictConfig, key: str) -> str:
    """Read a device."""
    value = read(config, key)
    if not isinstance(value, str) or not DEVICE.fullmatch(value):
        raise UsageError(f"{key} must be {DEVICE_NAMES}, got {shorten(value)}")
    return value


def read_shape(config: DictConfig, key: str) -> Triple:
    """Read [D, H, W] in voxels."""
    value = read(config, key)
    good = isinstance(value, list) and len(value) == 3
    if not good or not all(type(side) is int and 0 < side <= MAX_INT for side in value):
        raise UsageError(f"{key} must be three ints >= 1, got {shorten(value)}")
    d, h, w = value
    return d, h, w


def read_optional_shape(config: DictConfig, key: str) -> Triple | None:
    """Read [D, H, W] in voxels, or null."""
    return None if read(config, key) is None else read_shape(config, key)


def read_names(config: DictConfig, key: str) -> tuple[str, ...]:
    """Read a list of names."""
    value = read(config, key)
    if not isinstance(value, list) or not all(map(is_text, value)):
        raise UsageError(f"{key} must be a list of names, got {shorten(value)}")
    return tuple(map(str, value))


def read_regions(config: DictConfig, key: str) -> dict[str, tuple[int, ...]] | None:
    """Read names with the labels of each, or null."""
    value = read(config, key)
    if value is None:
        return None
    if not isinstance(value, dict) or not value:
        raise UsageError(
            f"{key} must be names with their labels, as in {key}={{whole:[1,2],core:[2]}}, "
            f"got {shorten(value)}"
        )
    regions = {}
    for name, labels in value.items():
        labels = labels if isinstance(labels, list) else [labels]
        if not labels or not all(type(label) is int for label in labels):
            raise UsageError(f"{key}.{name} must be a list of labels, got {labels!r}")
        regions[str(name)] = tuple(labels)
    return regions


def read_optional_labels(config: DictConfig, key: str) -> tuple[int, ...] | None:
    """Read a list of labels, or null."""
    value = read(config, key)
    if value is None:
        return None
    good = isinstance(value, list) and value
    if not good or not all(type(v) is int and 0 <= v <= MAX_INT for v in value):
        raise UsageError(f"{key} must be a list of labels, got {shorten(value)}")
    return tuple(value)


def read_annotated(config: DictConfig, key: str) -> Any:
    """Read which classes are annotated, by pattern of case names; the path of a file; or null."""
    value = read(config, key)
    if value is None or (isinstance(value, str) and is_text(value)):
        return value
    lists = [
        names if isinstance(names, list) else [names]
        for names in (value.values() if isinstance(value, dict) else ())
    ]
    if not lists or not all(names and all(map(is_text, names)) for names in lists):
        raise UsageError(
            f"{key} must be patterns of case names with the classes that they annotate, as in "
            f"{key}={{liver_*:[liver]}}, or a JSON file of these; got {shorten(value)}"
        )
    return value


def read_duration(config: DictConfig, key: str) -> float | None:
    """Read DD:HH:MM:SS as seconds, or null."""
    value = read(config, key)
    return None if value is None else parse_duration(value, key)


def parse_duration(value: Any, key: str) -> float:
    """Parse DD:HH:MM:SS as seconds.

    >>> parse_duration("01:00:00:30", "trainer.max_time")
    86430.0
    """
    parts = str(value).split(":")
    if len(parts) != 4 or not all(re.fullmatch("[0-9]{1,12}", part) for part in parts):
        raise UsageError(f"{key} must be DD:HH:MM:SS, as in 00:01:30:00, got {repr(value)[:40]}")
    days, hours, minutes, seconds = map(int, parts)
    duration = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 0 < duration <= MAX_SECONDS:
        raise UsageError(
            f"{key} must be between a second and {MAX_SECONDS // (24 * 60**2):,} days, got {value}"
        )
    return float(duration)


def format_duration(seconds: float) -> str:
    """Format a duration as DD:HH:MM:SS.

    >>> format_duration(147600)
    '01:17:00:00'
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    d, h = divmod(hours, 24)
    return f"{d:02}:{h:02}:{m:02}:{s:02}"


def read_paths(config: DictConfig, key: str) -> tuple[Path, ...]:
    """Read a path or a pattern, several separated by commas, or a list of these."""
    value = read(config, key)
    if not (is_text(value) or (isinstance(value, list) and value and all(map(is_text, value)))):
        raise UsageError(f"{key} must be a path or a list of paths, got {shorten(value)}")
    if isinstance(value, list):
        patterns = [str(pattern) for pattern in value]
    elif Path(str(value)).exists():
        return (Path(str(value)),)
    else:
        text = str(value).strip()
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
        patterns = [part.strip().strip("'\"") for part in text.split(",")]
    if not all(map(is_text, patterns)):
        raise UsageError(f"{key} must be a path or a list of paths, got {shorten(value)}")
    return tuple(path for pattern in patterns for path in _expand_pattern(pattern, key))


def _expand_pattern(pattern: str, key: str) -> list[Path]:
    path = Path(pattern)
    if path.exists() or not set(pattern) & set("*?["):
        return [path]
    matches = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not matches:
        raise UsageError(f"{key}: no file matches {pattern}")
    return matches
