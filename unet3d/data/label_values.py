"""Values of classes in label files that are not 0, 1, 2, ..., as of FreeSurfer or an atlas."""

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from unet3d.data.case import Case, run_on_cases
from unet3d.data.checks import collect_values
from unet3d.data.formats.volumes import MAX_LABEL, read_volume
from unet3d.data.preprocessing.cache import get_version
from unet3d.errors import UsageError
from unet3d.files import atomic_write, read_json
from unet3d.text import join_first

LabelValues = str | Sequence[int] | Mapping[str, int]
"""`auto`, a file that names values, the values of the classes, or the value of each name."""

KEY = "data.label_values"

CACHE = "label_values.json"


def read_label_values(
    setting: LabelValues,
    list_cases: Callable[[], Sequence[Case]],
    cache: Path,
    ignored: Sequence[int],
) -> dict[int, str | None]:
    """Return the value of each class, and its name if that is known; background comes first.

    A list or a mapping names all classes; with `auto` or a file, those that occur in the labels of
    the cases are meant.
    """
    if isinstance(setting, str):
        names = {} if setting == "auto" else read_table(Path(setting))
        values = sorted({0, *find_values(list_cases(), cache)} - {*ignored})
        if unnamed := [str(value) for value in values if names and value not in {0, *names}]:
            raise UsageError(
                f"{KEY}: {setting} does not name {join_first(unnamed)}, which labels hold"
            )
        if twice := [value for value in values if len({*names.get(value, ())}) > 1]:
            raise UsageError(
                f"{KEY}: {setting} names {twice[0]} twice: {join_first(names[twice[0]])}"
            )
        named = {value: next(iter(names.get(value, ())), None) for value in values}
    else:
        pairs = setting.items() if isinstance(setting, Mapping) else ((None, v) for v in setting)
        named = {value: name for name, value in pairs}
        if len(named) < len(setting):
            raise UsageError(f"{KEY} names a value twice")
    values = list(named)
    outside = [value for value in values if not 0 <= value <= MAX_LABEL]
    if values[:1] != [0] or len(values) < 2 or outside:
        raise UsageError(
            f"{KEY} must be two or more values of 0..{MAX_LABEL}, of which 0, the background, is "
            f"first; got {join_first(list(map(str, outside or values)))}"
        )
    return named


def read_table(file: Path) -> dict[int, list[str]]:
    """Return the names of values in a JSON object, or in lines with a value and a name.

    A line is one of FreeSurfer's color tables or of ITK-SNAP's label descriptions, or has columns
    that tabs, semicolons, commas or bars separate. A header says which; without one, these are the
    first and the first text after it. Other lines without a value are comments.
    """
    try:
        text = file.read_text("utf-8-sig")
        is_json = text.lstrip().startswith(("{", "["))
        content = json.loads(text, object_pairs_hook=tuple) if is_json else ()
    except (OSError, ValueError) as error:
        raise UsageError(f"{KEY}: {file.absolute()} cannot be read: {error}") from None
    if is_json:
        pairs = list(map(order_pair, content)) if isinstance(content, tuple) else []
    else:
        pairs = list_pairs(text.splitlines())
    named: dict[int, list[str]] = {}
    for value, name in pairs:
        if not str(value).isdecimal() or not isinstance(name, str) or is_number(name):
            raise UsageError(f"{KEY}: {file} must map values to names, not {value} to {name}")
        named.setdefault(int(value), []).append(name or str(value))
    if not named:
        raise UsageError(f"{KEY}: {file} must name values of labels, in lines or a JSON object")
    return named


def order_pair(pair: tuple[str, Any]) -> tuple[Any, Any]:
    """Return the value and the name of a pair in a JSON object; both orders are in use."""
    key, other = pair
    is_value = type(other) is int or (isinstance(other, str) and other.isdecimal())
    return (other, key) if is_value and not key.isdecimal() else pair


NUMBER = r"[-+]?\d*\.?\d+"
HEX_COLOR = r"#[0-9a-fA-F]{6,8}"

DELIMITERS = "\t;,|"

ALPHAS = {"0"}, {"1"}, {"255"}
"""How opaque the colors of a table are, which is the same in all of its lines."""

NAME_COLUMNS = ("name", "labelname", "structure", "region", "label")
VALUE_COLUMNS = ("value", "labelvalue", "label", "index", "id")
"""What headers of tables call them; the first that there is counts, and for one of the two."""

COLORS = 3
"""Columns of a color. A table with fewer columns of other numbers may have its values in these."""


def list_pairs(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return the values and the names in the lines of a table.

    >>> list_pairs(["# no. name: R G B A", "0 Unknown 0 0 0 0", "17 Left hippo, 1  220 216 20 0"])
    [('0', 'Unknown'), ('17', 'Left hippo, 1')]
    >>> list_pairs(["17 area 1 2 3", "18 area 4"]), list_pairs(["17 area 44 9 9 9", "18 a 9 9 9"])
    ([('17', 'area 1 2 3'), ('18', 'area 4')], [('17', 'area 44'), ('18', 'a')])
    >>> list_pairs(['4 255 0 0 1 1 1 "Left ventricle"', "5 255 0 0"])
    [('4', 'Left ventricle'), ('5', '')]
    >>> list_pairs(["color,Name,Index", 'red,"Gyrus, left",2001'])
    [('2001', 'Gyrus, left')]
    """
    lines = [line.strip() for line in lines if line.strip("# \t") and line[0] != "#"]
    rows = [split_line(line) for line in lines]
    value_at, name_at = 0, None
    if rows and len(rows[0]) > 1 and rows[0][1][:1] != " " and not rows[0][0].isdecimal():
        value_at, name_at = find_columns(rows[0])
        delimiter = next(d for d in DELIMITERS if d in lines[0])
        rows = [split_cells(line, delimiter) for line in lines]
        for row in rows:
            row[value_at : value_at + 1] = [c.removesuffix(".0") for c in row[value_at:][:1]]
    rows = [row for row in rows if len(row) > max(value_at, 1) and row[value_at].isdecimal()]
    spaced = [row[1].split() for row in rows if row[1][:1] == " "]
    counts = [*map(count_numbers, spaced)]
    last = {words[-1] for words, count in zip(spaced, counts, strict=True) if count > COLORS}
    color = COLORS + (last in ALPHAS) if 2 * sum(n >= COLORS for n in counts) > len(counts) else 0
    pairs = []
    for row in rows:
        if row[1].startswith(" "):
            words = re.sub(rf"^( {NUMBER}){{3,}}", "", row[1]).split()
            count = min(color, count_numbers(words))
            name = " ".join(words[: len(words) - count] if count >= COLORS else words)
            if re.fullmatch('"[^"]*"', name):
                name = name[1:-1]
        elif name_at is not None:
            name = row[name_at] if name_at < len(row) else ""
        else:
            texts = (c for c in row[1:] if not is_number(c) and not re.fullmatch(HEX_COLOR, c))
            name = next(texts, row[1])
            if 0 < sum(map(is_number, row[1:])) < COLORS and not is_number(name):
                raise UsageError(
                    f"{KEY}: which number of {', '.join(row)} is the value? Begin the table with a "
                    "header, such as index and name"
                )
        pairs.append((row[value_at], name))
    return pairs


def find_columns(header: Sequence[str]) -> tuple[int, int]:
    """Return which columns have the values and the names.

    >>> find_columns(["index", "label", "name"]), find_columns(["Index", "Label Name"])
    ((1, 2), (0, 1))
    """
    shown, header = header, [cell.casefold().replace(" ", "") for cell in header]
    name = next((name for name in NAME_COLUMNS if name in header), None)
    value = next((value for value in VALUE_COLUMNS if value in header and value != name), None)
    if value is None or name is None:
        raise UsageError(
            f"{KEY}: call the columns of a table index and name, not {', '.join(shown)}"
        )
    return header.index(value), header.index(name)


def count_numbers(words: Sequence[str]) -> int:
    """Return how many of the words are numbers at the end."""
    return len([*takewhile(is_number, reversed(words))])


def split_line(line: str) -> list[str]:
    """Return the columns of a line; where spaces separate, its first word, and " " and the rest."""
    for delimiter in DELIMITERS:
        cells = split_cells(line, delimiter)
        if len(cells) > 1 and (cells[0].isdecimal() or not line[0].isdecimal()):
            return cells
    first, *rest = line.split(" # ")[0].split()
    quoted = re.fullmatch(r'[\d.\s]*"(.*)"', line)
    return [first, *([quoted[1]] if quoted else [" " + " ".join(rest)] if rest else [])]


def split_cells(line: str, delimiter: str) -> list[str]:
    """Return the columns of a line, without quotes and spaces around them."""
    [cells] = csv.reader([line], delimiter=delimiter, skipinitialspace=True)
    return [cell.strip() for cell in cells]


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    return re.fullmatch(rf"{NUMBER}(e[-+]?\d+)?", text, re.IGNORECASE) is not None


def find_values(cases: Sequence[Case], cache: Path) -> set[int]:
    """Return the values that occur in the labels of the cases, from the cache if they are there."""
    known: dict[str, list[int]] = {}
    with suppress(OSError, ValueError):  # where it is missing or damaged, all labels are read
        known = read_json(cache / CACHE)

    def find(case: Case) -> tuple[str, list[int]] | None:
        try:
            key = get_version(case.label)
            if key in known:
                return key, known[key]
            values = collect_values(read_volume(case.label)[0])
        except (UsageError, OSError):
            return None  # what checks the cases says why
        return key, [int(v) for v in values.tolist() if float(v).is_integer()]

    found = dict(filter(None, run_on_cases(find, cases, doing="looking for label values")))
    if found.keys() - known.keys():
        with suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            with atomic_write(cache / CACHE) as draft:
                draft.write_text(json.dumps(known | found), "utf-8")
    return {value for values in found.values() for value in values}
