"""Which cases are of one patient, so that no fold trains on one and validates on the other."""

import csv
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from unet3d.data.findings import Finding
from unet3d.errors import UsageError

WAYS = (
    "a regular expression with a capture group, as 'patient(\\d+)_frame\\d+', or a .json or .csv "
    "file of cases and groups"
)

SCANS = (
    "frame|phase|visit|timepoint|time|tp|scan|session|ses|exam|study|acq|run|baseline|followup|fu|"
    "day|week|month|year"
)
"""What the last part of a case's name calls one of several scans of a patient."""

PATIENTS = "patient|pat|subject|subj|sub|case|person|id|p|s"
"""What a case's name calls a patient, before the number."""


def read_groups(group_by: object, names: Sequence[str]) -> dict[str, str]:
    """The group of every case: captured from its name, or looked up in a file."""
    if not isinstance(group_by, str) or not group_by:
        raise UsageError(f"data.group_by must be {WAYS}, got {group_by!r}")
    if group_by.lower().endswith((".json", ".csv")):
        file = Path(group_by)
        found = _from_file(file)
        told = f"{file} has no group for"
    else:
        found = _captured(group_by, names)
        told = f"data.group_by={group_by!r} captures nothing from"
    lacking = [name for name in names if not found.get(name)]
    if lacking:
        raise UsageError(
            f"{told} {len(lacking)} of {len(names)} cases: {', '.join(lacking[:5])}"
            + (", ..." if len(lacking) > 5 else "")
        )
    return {name: found[name] for name in names}


def _captured(pattern: str, names: Sequence[str]) -> dict[str, str]:
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(
            f"data.group_by={pattern!r} is no regular expression: {error}; expected {WAYS}"
        ) from None
    if not compiled.groups:
        raise UsageError(
            f"data.group_by={pattern!r} has no capture group: put the part of the name that tells "
            "the patient in parentheses, as in 'patient(\\d+)_frame\\d+'"
        )
    matches = {name: compiled.search(name) for name in names}
    return {name: match[1] or "" for name, match in matches.items() if match}


def _from_file(file: Path) -> dict[str, str]:
    """{case: group} of a JSON object, or of a CSV file with two columns, with a head or without."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix.lower() == ".csv":
            rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]
            pairs = [(case, group) for case, group in rows]
        else:
            pairs = list(json.loads(text).items())
    except FileNotFoundError:
        raise UsageError(f"data.group_by: there is no {file.absolute()}") from None
    except (ValueError, AttributeError, RecursionError, csv.Error):
        pairs = [("", None)]
    groups: dict[str, str] = {}
    for case, group in pairs:
        if isinstance(group, bool) or not isinstance(group, str | int):
            raise UsageError(
                f"{file} must be a JSON object {{case: group}} or a CSV file with the columns case "
                "and group"
            )
        if groups.setdefault(case, str(group)) != str(group):
            raise UsageError(f"{file} has two groups for {case}: {groups[case]} and {group}")
    return groups


def describe_groups(names: Sequence[str], groups: Mapping[str, str] | None) -> str:
    """How many cases, and of how many groups.

    >>> describe_groups(["a1", "a2", "b1"], {"a1": "a", "a2": "a", "b1": "b"})
    '3 cases of 2 groups'
    """
    said = f"{len(names)} case{'s' * (len(names) != 1)}"
    if groups is not None:
        count = len({groups[name] for name in names})
        said += f" of {count} group{'s' * (count != 1)}"
    return said


def find_likely_groups(names: Sequence[str]) -> Finding | None:
    r"""What to say where case names look like several scans of one patient; None where not.

    >>> find_likely_groups([f"patient00{p}_frame0{f}" for p in (1, 2) for f in (1, 7)]).do
    "set data.group_by='(.+)_frame\\d+', which keeps the scans of a patient in one fold"
    """
    for ending in (rf"[-_]?(?:{SCANS})[-_]?\d*", r"[-_]\d{1,3}"):
        split = [re.fullmatch(rf"(.*\d)({ending})", name, re.IGNORECASE) for name in names]
        matches = [match for match in split if match]
        if len(matches) < len(names):
            continue
        scans = Counter(match[1] for match in matches)
        most = max(scans.values(), default=0)
        # Of a center or a year there are many cases: a patient has few scans, or is called one.
        called = all(re.search(rf"(?:^|[-_])(?:{PATIENTS})[-_]?\d+$", s, re.I) for s in scans)
        if len(scans) < 2 or most < 2 or not (called or len(scans) >= most):
            continue
        patient = scans.most_common(1)[0][0]
        one, other = [match[0] for match in matches if match[1] == patient][:2]
        endings = sorted({re.sub(r"\d+", r"\\d+", match[2]) for match in matches})
        ends = endings[0] if len(endings) == 1 else f"(?:{'|'.join(endings)})"
        found = f"{len(names)} cases look like scans of {len(scans)} patients, as {one} and {other}"
        return Finding(
            case=None,
            file=None,
            what=found,
            do=f"set data.group_by='(.+){ends}', which keeps the scans of a patient in one fold",
            hint=True,
        )
    return None
