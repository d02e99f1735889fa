"""Values of classes in label files that are not 0, 1, 2, ..., as of FreeSurfer or an atlas."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from unet3d.data.case import Case, run_on_cases
from unet3d.data.checks import collect_values
from unet3d.data.formats.volumes import MAX_LABEL, read_volume
from unet3d.data.layouts.dataset_json import load_json_object
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
    if values[:1] != [0] or len(values) < 2 or not 0 <= min(values) <= max(values) <= MAX_LABEL:
        raise UsageError(
            f"{KEY} must be two or more values of 0..{MAX_LABEL}, of which 0, the background, is "
            f"first; got {join_first(list(map(str, values)))}"
        )
    return named


def read_table(file: Path) -> dict[int, list[str]]:
    """Return the names of values in a JSON file, or in lines with a value and a name.

    Of a line, the first number and the first text count, as in FreeSurfer's color tables and the
    label descriptions of ITK-SNAP; of several columns with names, the first. Other lines are
    comments.
    """
    if file.suffix == ".json":
        content = load_json_object(file, f"{KEY}: no file {file.absolute()}")
        pairs = [(k, v) if str(k).isdecimal() else (v, k) for k, v in content.items()]
        if numbers := [f"{k} to {v}" for k, v in pairs if not is_text(str(v))]:
            raise UsageError(f"{KEY}: {file} must map values to names, not {numbers[0]}")
    else:
        try:
            lines = file.read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{KEY}: {file.absolute()} cannot be read: {error}") from None
        pairs = list(filter(None, map(split_line, lines)))
    named: dict[int, list[str]] = {}
    for value, name in pairs:
        if str(value).isdecimal():
            named.setdefault(int(value), []).append(str(name))
    if not named:
        raise UsageError(f"{KEY}: {file} must name values of labels")
    return named


def split_line(line: str) -> tuple[str, str] | None:
    """Return the value and the name in a line of a table; None if it has no value.

    >>> split_line("17  Left-Hippocampus  220 216 20 0"), split_line("2001,Precentral gyrus")
    (('17', 'Left-Hippocampus'), ('2001', 'Precentral gyrus'))
    >>> split_line("53 area 4p E 1 2 3"), split_line('54,"Amygdala, right",R')
    (('53', 'area 4p E'), ('54', 'Amygdala, right'))
    >>> split_line('4 255 0 0 1 1 1 "Left ventricle"'), split_line("# value name")
    (('4', 'Left ventricle'), None)
    """
    for pattern, columns in ((r'"[^"]*"|[^,;\t]+', True), (r'"[^"]*"|\S+', False)):
        first, *rest = [part.strip(' "') for part in re.findall(pattern, line)] or [""]
        if first.isdecimal():
            if columns or '"' in line:
                return first, next(filter(is_text, rest), first)
            text = " ".join(rest)
            text = re.sub(rf"^({NUMBER} ){{3,}}|( {NUMBER}){{3,4}}$", "", text)  # of a color
            return first, text if is_text(text) else first
    return None


NUMBER = r"[-+]?\d*\.?\d+"


def is_text(part: str) -> bool:
    """Return whether a part of a line is no number."""
    return re.fullmatch(rf"({NUMBER}(e[-+]?\d+)?)?", part, re.IGNORECASE) is None


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
