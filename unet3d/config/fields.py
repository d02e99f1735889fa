"""Read the options of a config into typed settings, each as the type of its field says.

>>> @dataclass(frozen=True, kw_only=True)
... class Windows:
...     overlap: Annotated[float, number(">= 0", "below 1")]
...     batch_size: Annotated[int | None, integer(">= 1")]
>>> read_settings(Windows, OmegaConf.create({"overlap": 0.5, "batch_size": None}))
Windows(overlap=0.5, batch_size=None)
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from unet3d.config.compose import to_plain, to_yaml_literal
from unet3d.config.instantiate import Factory, read_factories, read_factory
from unet3d.errors import UsageError
from unet3d.types import DEVICE, DEVICE_NAMES, PRECISIONS, Triple, find_precision

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class OptionType:
    """What an option may be: in words, as a test, and how it is stored."""

    words: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    gives_none: bool = False  # a word is stored as None: null has no meaning of its own

    def parse(self, value: Any, key: str) -> Any:
        """Return a value as it is stored, or refuse it."""
        if not self.accepts(value):
            raise UsageError(f"{key} must be {self.words}, got {value!r}")
        return self.convert(value)


def read_settings(
    settings: type[Settings], config: DictConfig, prefix: str = "", **given: Any
) -> Settings:
    """Build a settings class, each field from the key of its name.

    A text in the annotation of a field names another key. Fields that are `given`, and fields with
    a default, are not read.
    """
    hints = get_type_hints(settings, include_extras=True)
    for field in fields(settings):  # ty: ignore[invalid-argument-type]
        if field.name not in given and field.default is MISSING:
            given[field.name] = convert_option(config, prefix, field.name, hints[field.name])
    return settings(**given)


def convert_option(config: DictConfig, prefix: str, name: str, hint: Any) -> Any:
    """Return a value as an annotation says: a type, or a union of one with words and None."""
    notes: Sequence[Any] = ()
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
    key = prefix + next((note for note in notes if isinstance(note, str)), name)
    if hint is Factory:
        return read_factory(config, key)
    if hint == Mapping[str, Factory]:
        return read_factories(config, key)
    if is_dataclass(hint):
        return read_settings(hint, config, f"{key}.")
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    types = [p for p in parts if p is not NoneType and get_origin(p) is not Literal]
    value = read(config, key)
    if not types:
        return one_of(words).parse(value, key)
    kind = next((note for note in notes if isinstance(note, OptionType)), None) or KINDS[types[0]]
    if value in words or (value is None and NoneType in parts and not kind.gives_none):
        return value
    return replace(kind, words=" or ".join([kind.words, *words])).parse(value, key)


def read(config: DictConfig, key: str) -> Any:
    """Return a value as plain Python, with lists and mappings resolved."""
    return to_plain(OmegaConf.select(config, key))


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def is_text(value: Any) -> bool:
    """Return whether a value can be a name or a path: text, or a number that stands for it."""
    return bool(value) if isinstance(value, str) else is_number(value)


COMPARISONS = {">=": operator.ge, "above": operator.gt, "below": operator.lt, "<=": operator.le}


def number(*bounds: str) -> OptionType:
    """Return the numbers within bounds.

    >>> number("above 0", "below 1").words
    'a number above 0 and below 1'
    """
    limits = [(COMPARISONS[word], float(limit)) for word, limit in map(str.split, bounds)]

    def accepts(value: Any) -> bool:
        return is_number(value) and all(compare(value, limit) for compare, limit in limits)

    return OptionType(f"a number {' and '.join(bounds)}", accepts, float)


def integer(*bounds: str) -> OptionType:
    """Return the ints within bounds."""
    within = number(*bounds).accepts
    words = f"an int {' and '.join(bounds)}"
    return OptionType(words, lambda value: type(value) is int and within(value))


def one_of(choices: Sequence[str]) -> OptionType:
    """Return a few words."""
    return OptionType(f"one of {', '.join(choices)}", lambda value: value in choices)


def word_or(
    word: str | bool | None, kind: OptionType, stored: Any = None, *, gives_none: bool = True
) -> OptionType:
    """Return a kind of values, or a word, which stands for what is stored.

    Without `gives_none`, null stands for it, too.
    """

    def is_word(value: Any) -> bool:
        return type(value) is type(word) and value == word

    return OptionType(
        f"{to_yaml_literal(word)} or {kind.words}",
        lambda value: is_word(value) or kind.accepts(value),
        lambda value: stored if is_word(value) else kind.convert(value),
        gives_none=gives_none,
    )


def list_of(kind: OptionType, words: str = "", length: int | None = None) -> OptionType:
    """Return lists of `length` values, or of one or more; they are stored as tuples."""

    def accepts(value: Any) -> bool:
        has_length = isinstance(value, list) and len(value) == (length or len(value) or 1)
        return has_length and all(map(kind.accepts, value))

    words = words or f"a list of {kind.words}"
    return OptionType(words, accepts, lambda value: tuple(map(kind.convert, value)))


def one_or_list_of(kind: OptionType, words: str = "") -> OptionType:
    """Return single values and lists of one or more; both are stored as tuples."""
    several = list_of(kind, words)
    return OptionType(
        words,
        lambda value: several.accepts(value) or kind.accepts(value),
        lambda value: several.convert(value if isinstance(value, list) else [value]),
    )


def mapping_of(kind: OptionType, words: str) -> OptionType:
    """Return mappings from one or more names to values."""
    return OptionType(
        words,
        lambda v: isinstance(v, dict) and bool(v) and all(map(kind.accepts, v.values())),
        lambda value: {str(k): kind.convert(v) for k, v in value.items()},
    )


def _to_seconds(duration: str) -> float:
    return sum(int(n) * s for n, s in zip(duration.split(":"), (86400, 3600, 60, 1.0), strict=True))


def format_duration(seconds: float) -> str:
    """Format a duration as DD:HH:MM:SS.

    >>> format_duration(147600)
    '01:17:00:00'
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    d, h = divmod(hours, 24)
    return f"{d:02}:{h:02}:{m:02}:{s:02}"


def _list_paths(value: Any) -> list[Any]:
    """Return a path or a pattern, several separated by commas, or a list of these, as a list."""
    if isinstance(value, str) and not Path(value).exists():
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, list) else [value]


def _expand_patterns(value: Any) -> tuple[Path, ...]:
    paths: list[Path] = []
    for path in map(Path, map(str, _list_paths(value))):
        if path.exists() or not set(str(path)) & set("*?["):
            paths.append(path)
        elif matches := sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor)))):
            paths += [match for match in matches if match.is_dir()] or matches  # such as runs
        else:
            raise UsageError(f"no file matches {path}")
    return tuple(paths)


BOOL = OptionType("true or false", lambda value: isinstance(value, bool))
TEXT = OptionType("text", is_text, str)
PATH = OptionType("a path", is_text, lambda value: Path(str(value)))
PATHS = OptionType(
    "a path or a list of paths",
    lambda value: bool(value) and all(map(is_text, _list_paths(value))),
    _expand_patterns,
)
NAMES = OptionType(
    "a list of names",
    lambda value: isinstance(value, list) and all(map(is_text, value)),
    lambda value: tuple(map(str, value)),
)
LABEL = OptionType("a label", lambda value: type(value) is int)
REGIONS = mapping_of(one_or_list_of(LABEL), "names with their labels, as in {whole:[1,2],core:[2]}")
PATTERNS = mapping_of(one_or_list_of(TEXT), "patterns of case names")
ANNOTATED = OptionType(
    "patterns of case names with the classes that they annotate, as in {liver_*:[liver]}, or a "
    "JSON file of these",
    lambda value: PATTERNS.accepts(value) or (isinstance(value, str) and bool(value)),
)
DURATION = OptionType(
    "DD:HH:MM:SS above zero, as in 00:01:30:00",
    lambda v: re.fullmatch(r"\d+(:\d+){3}", str(v)) is not None and _to_seconds(str(v)) > 0,
    _to_seconds,
)
PRECISION = OptionType(
    f"one of {', '.join(PRECISIONS)}",
    lambda value: find_precision(value) is not None,
    find_precision,
)
DEVICE_KIND = OptionType(
    DEVICE_NAMES, lambda value: isinstance(value, str) and bool(DEVICE.fullmatch(value))
)
SKIP = OptionType("one of error, skip", lambda value: value in ("error", "skip"), "skip".__eq__)
"""What to do about something: whether to skip it."""

KINDS: dict[Any, OptionType] = {
    bool: BOOL,
    str: TEXT,
    Path: PATH,
    tuple[Path, ...]: PATHS,
    tuple[str, ...]: NAMES,
    Triple: list_of(integer(">= 1"), "three ints >= 1", length=3),
}
"""What fields of these types are without a range."""
