"""Read single values of a config; an error names the key, what it must be and what was given."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf

from unet3d.errors import UsageError
from unet3d.types import DEVICE, DEVICE_NAMES, Triple


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
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def is_text(value: Any) -> bool:
    """Return whether a value can be a name or a path: text, or a number that stands for it.

    >>> is_text("a b"), is_text(7), is_text(""), is_text(True), is_text(["a"])
    (True, True, False, False, False)
    """
    return bool(value) if isinstance(value, str) else is_number(value)


def read_bool(config: DictConfig, key: str) -> bool:
    """Read true or false."""
    value = read(config, key)
    if not isinstance(value, bool):
        raise UsageError(f"{key} must be true or false, got {value!r}")
    return value


def read_int(config: DictConfig, key: str, *, minimum: int) -> int:
    """Read an int of at least `minimum`."""
    value = read(config, key)
    if type(value) is not int or value < minimum:
        raise UsageError(f"{key} must be an int >= {minimum}, got {value!r}")
    return value


def read_optional_int(config: DictConfig, key: str, *, minimum: int) -> int | None:
    """Read an int of at least `minimum`, or null."""
    return None if read(config, key) is None else read_int(config, key, minimum=minimum)


def read_float(
    config: DictConfig, key: str, *, minimum: float = 0.0, exclusive: bool = False
) -> float:
    """Read a number of at least `minimum`, or above it."""
    value = read(config, key)
    if not is_number(value) or value < minimum or (exclusive and value == minimum):
        bound = f"above {minimum:g}" if exclusive else f">= {minimum:g}"
        raise UsageError(f"{key} must be a number {bound}, got {value!r}")
    return float(value)


def read_choice(config: DictConfig, key: str, choices: Sequence[str]) -> str:
    """Read one of `choices`."""
    value = read(config, key)
    if value not in choices:
        raise UsageError(f"{key} must be one of {', '.join(choices)}, got {value!r}")
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
        raise UsageError(f"{key} must be {expected}, got {value!r}")
    return str(value)


def read_devices(config: DictConfig, key: str) -> int | Literal["auto"]:
    """Read a number of processes, or auto."""
    value = read(config, key)
    if value != "auto" and (type(value) is not int or value < 1):
        raise UsageError(f"{key} must be auto or an int >= 1, got {value!r}")
    return value


def read_device(config: DictConfig, key: str) -> str:
    """Read a device."""
    value = read(config, key)
    if not isinstance(value, str) or not DEVICE.fullmatch(value):
        raise UsageError(f"{key} must be {DEVICE_NAMES}, got {value!r}")
    return value


def read_shape(config: DictConfig, key: str) -> Triple:
    """Read [D, H, W] in voxels."""
    value = read(config, key)
    good = isinstance(value, list) and len(value) == 3
    if not good or not all(type(side) is int and side > 0 for side in value):
        raise UsageError(f"{key} must be three ints >= 1, got {value!r}")
    d, h, w = value
    return d, h, w


def read_optional_shape(config: DictConfig, key: str) -> Triple | None:
    """Read [D, H, W] in voxels, or null."""
    return None if read(config, key) is None else read_shape(config, key)


def read_names(config: DictConfig, key: str) -> tuple[str, ...]:
    """Read a list of names."""
    value = read(config, key)
    if not isinstance(value, list) or not all(map(is_text, value)):
        raise UsageError(f"{key} must be a list of names, got {value!r}")
    return tuple(map(str, value))


def read_regions(config: DictConfig, key: str) -> dict[str, tuple[int, ...]] | None:
    """Read names with the labels of each, or null."""
    value = read(config, key)
    if value is None:
        return None
    if not isinstance(value, dict) or not value:
        raise UsageError(
            f"{key} must be names with their labels, as in {key}={{whole:[1,2],core:[2]}}, "
            f"got {value!r}"
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
    if not good or not all(type(v) is int and v >= 0 for v in value):
        raise UsageError(f"{key} must be a list of labels, got {value!r}")
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
            f"{key}={{liver_*:[liver]}}, or a JSON file of these; got {value!r}"
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
    if len(parts) != 4 or not all(map(str.isdecimal, parts)) or not any(map(int, parts)):
        raise UsageError(f"{key} must be DD:HH:MM:SS above zero, as in 00:01:30:00, got {value!r}")
    days, hours, minutes, seconds = map(int, parts)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


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
    if isinstance(value, str) and not Path(value).exists():
        text = value.strip()
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
        value = [part.strip().strip("'\"") for part in text.split(",")]
    patterns = value if isinstance(value, list) else [value]
    if not patterns or not all(map(is_text, patterns)):
        raise UsageError(f"{key} must be a path or a list of paths, got {value!r}")
    return tuple(path for pattern in patterns for path in _expand_pattern(str(pattern), key))


def _expand_pattern(pattern: str, key: str) -> list[Path]:
    path = Path(pattern)
    if path.exists() or not set(pattern) & set("*?["):
        return [path]
    matches = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not matches:
        raise UsageError(f"{key}: no file matches {pattern}")
    return matches
