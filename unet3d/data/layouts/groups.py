"""Group the cases of one patient, so that no fold trains on one and validates on another."""

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from unet3d.errors import UsageError
from unet3d.files import read_json
from unet3d.text import escape_unprintable, join_first, pluralize

ACCEPTED = (
    "a regular expression with a capture group, such as 'patient(\\d+)_frame\\d+', or a .json or "
    ".csv file of cases and groups"
)

SCAN_WORDS = (
    "frame|phase|visit|timepoint|time|tp|scan|session|ses|exam|study|acq|run|baseline|followup|fu|"
    "day|week|month|year"
)
"""Words for one of several scans of a patient, at the end of a case's name."""

PATIENT_WORDS = "patient|pat|subject|subj|sub|case|person|id|p|s"
"""Words for a patient in a case's name, before the number."""


class LikelyGroups(NamedTuple):
    """What names of cases suggest: several scans of each patient."""

    pattern: str  # for data.group_by
    message: str

    @property
    def option(self) -> str:
        """Return what to add to a command, as a shell takes it."""
        return f"data.group_by='{self.pattern}'"


def read_groups(group_by: str, names: Sequence[str], key: str = "data.group_by") -> dict[str, str]:
    """Return the group of every case: captured from its name, or read from a file."""
    if group_by.lower().endswith((".json", ".csv")):
        file = Path(group_by)
        groups = _read_file(file, key)
        problem = f"{file} has no group for"
    else:
        groups = _capture_groups(group_by, names, key)
        problem = f"{key}={group_by!r} captures nothing from"
    ungrouped = [name for name in names if not groups.get(name)]
    if ungrouped:
        raise UsageError(
            f"{problem} {len(ungrouped)} of {len(names)} cases: {join_first(ungrouped)}"
        )
    return {name: groups[name] for name in names}


def _capture_groups(pattern: str, names: Sequence[str], key: str) -> dict[str, str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"{key}={pattern!r} is not a valid regular expression: {error}; expected {ACCEPTED}"
        ) from None
    if not compiled.groups:
        raise UsageError(f"{key}={pattern!r} has no capture group: it must be {ACCEPTED}")
    matches = {name: compiled.search(name) for name in names}
    return {name: match[1] or "" for name, match in matches.items() if match}


def _read_file(file: Path, key: str) -> dict[str, str]:
    """Read {case: group} from a JSON object or a two-column CSV file with or without a header."""
    try:
        if file.suffix.lower() == ".csv":
            lines = file.read_text("utf-8-sig").splitlines()
            rows = [[cell.strip() for cell in row] for row in csv.reader(lines) if row]
            pairs = [(case, group) for case, group in rows]
        else:
            pairs = list(read_json(file).items())
    except FileNotFoundError:
        raise UsageError(f"{key}: no file {file.absolute()}") from None
    except (ValueError, AttributeError, csv.Error):
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
    """Describe the number of cases and of groups.

    >>> describe_groups(["a1", "a2", "b1"], {"a1": "a", "a2": "a", "b1": "b"})
    '3 cases in 2 groups'
    """
    cases = pluralize(len(names), "case")
    if groups is None:
        return cases
    return f"{cases} in {pluralize(len({groups[name] for name in names}), 'group')}"


def find_likely_groups(names: Sequence[str]) -> LikelyGroups | None:
    r"""Return the groups of case names that look like several scans per patient.

    >>> find_likely_groups([f"patient00{p}_frame0{f}" for p in (1, 2) for f in (1, 7)]).option
    "data.group_by='(.+)_frame\\d+'"
    """
    for suffix in (rf"[-_]?(?:{SCAN_WORDS})[-_]?\d*", r"[-_]\d{1,3}"):
        all_matches = [re.fullmatch(rf"(.*\d)({suffix})", name, re.IGNORECASE) for name in names]
        matches = [match for match in all_matches if match]
        if len(matches) < len(names):
            continue
        scans = Counter(match[1] for match in matches)
        max_scans = max(scans.values(), default=0)
        # A center or a year has many cases. A patient has few scans, or is named as a patient.
        are_patients = all(
            re.search(rf"(?:^|[-_])(?:{PATIENT_WORDS})[-_]?\d+$", s, re.I) for s in scans
        )
        if len(scans) < 2 or max_scans < 2 or not (are_patients or len(scans) >= max_scans):
            continue
        patient = scans.most_common(1)[0][0]
        one, other = [escape_unprintable(m[0]) for m in matches if m[1] == patient][:2]
        suffixes = sorted({re.sub(r"\d+", r"\\d+", match[2]) for match in matches})
        pattern = suffixes[0] if len(suffixes) == 1 else f"(?:{'|'.join(suffixes)})"
        return LikelyGroups(
            pattern=f"(.+){pattern}",
            message=f"{len(names)} cases look like scans of {len(scans)} patients, "
            f"for example {one} and {other}",
        )
    return None
