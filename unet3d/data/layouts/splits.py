"""Split cases into training and validation; the cases of a patient stay together."""

import csv
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unet3d.data.case import Case
from unet3d.errors import UsageError
from unet3d.files import read_json
from unet3d.text import escape_unprintable, join_first, pluralize

NUM_FOLDS = 5
SEED = 12345

Fold = tuple[set[str], set[str]]  # the names of the training and the validation cases

VISIT_WORDS = (
    "visit|v|timepoint|time|tp|t|session|ses|baseline|base|bl|followup|fu|"
    "day|d|week|month|m|year|pre|post"
)
SCAN_WORDS = "frame|phase|scan|mri|mr|ct|exam|study|acq|run|left|right|l|r|a|b"
"""Words for one of several scans of a patient, in a case's name; scan may be one of a scanner."""

DATE = r"(?:19|20)\d\d(?:[-_](?:0[1-9]|1[0-2])(?:[-_][0-3]\d)?|(?:0[1-9]|1[0-2])[0-3]\d)"

PATIENT_WORDS = "patient|pat|subject|subj|sub|case|person|id|p"
"""Words for a patient in a case's name, before the number; s may be a scanner or a site."""

PATIENT = re.compile(rf"(?:.*[-_])?(?:{PATIENT_WORDS})[-_]?\d+", re.IGNORECASE)

START = r"(?:[-_]|(?<=\d))"
LAST_PART = re.compile(
    rf"(.+?)(?:{START}(?:{VISIT_WORDS})(?:[-_]?\d+)?|[-_]{DATE}|"
    rf"({START}(?:{SCAN_WORDS})(?:[-_]?\d+)?|(?<=\d)[-_]\d{{1,3}}))",
    re.IGNORECASE,
)
"""What a name is without its last part, and that part if it may also number a site's patients."""


def split_cases(
    cases: Sequence[Case],
    fold: int | None,
    file: Path | None = None,
    groups: Mapping[str, str] | None = None,
) -> tuple[list[Case], list[Case]]:
    """Return (training, validation) cases of a fold; fold None trains on every case.

    Without a file, folds 0..4 are nnU-Net's, which are those of sklearn's
    KFold(5, shuffle=True, random_state=12345) on the sorted names. With groups, the sorted groups
    are split instead, and a file that splits a group is refused.
    """
    ordered = sorted(cases, key=lambda case: case.name)
    if fold is None:
        return ordered, []
    names = [case.name for case in ordered]
    if file is None:
        if not 0 <= fold < NUM_FOLDS:
            raise UsageError(f"fold must be 0..{NUM_FOLDS - 1} or none, got {fold}")
        if (problem := explain_too_few(names, groups)) is not None:
            raise UsageError(problem)
        groups = groups or {name: name for name in names}
        units = sorted({groups[name] for name in names})
        order = np.arange(len(units))
        np.random.RandomState(SEED).shuffle(order)
        chosen = {units[n] for n in np.array_split(order, NUM_FOLDS)[fold]}
        held_out = {name for name in names if groups[name] in chosen}
        trained = {*names} - held_out
    else:
        folds = read_folds(file, names)
        if not 0 <= fold < len(folds):
            raise UsageError(
                f"fold must be 0..{len(folds) - 1}, the folds of {file}, or none, got {fold}"
            )
        trained, held_out = folds[fold]
        if groups is not None:
            shared = {groups[name] for name in trained} & {groups[name] for name in held_out}
            if shared:
                raise UsageError(
                    f"{file}: fold {fold} trains and validates on cases of "
                    f"{join_first(sorted(shared))}, which data.group_by keeps together: move them, "
                    "or remove data.splits or data.group_by"
                )
    training, validation = ([c for c in ordered if c.name in part] for part in (trained, held_out))
    return training, validation


def explain_too_few(names: Collection[str], groups: Mapping[str, str] | None) -> str | None:
    """Return why cases, or their groups, cannot be split into folds.

    >>> explain_too_few(["a", "b"], None)
    '2 cases cannot be split into 5 folds: set fold=none, or list folds in a file for data.splits'
    """
    count = len(names if groups is None else {groups[name] for name in names})
    if count >= NUM_FOLDS:
        return None
    units = pluralize(count, "case" if groups is None else "group")
    return (
        f"{units} cannot be split into {NUM_FOLDS} folds: set fold=none, or list folds in a file "
        "for data.splits"
    )


def read_folds(file: Path, cases: Sequence[str]) -> list[Fold]:
    """Read a JSON list with {"train": [names], "val": [names]} per fold."""
    try:
        folds = [(set(part["train"]), set(part["val"])) for part in read_json(file)]
    except FileNotFoundError:
        raise UsageError(f"data.splits: no file {file.absolute()}") from None
    except (OSError, ValueError, TypeError, KeyError):
        raise UsageError(
            f'{file} must be a JSON list with {{"train": [names], "val": [names]}} per fold'
        ) from None
    if unknown := {name for fold in folds for part in fold for name in part}.difference(cases):
        names = join_first(sorted(map(str, unknown)))
        raise UsageError(f"{file} names cases that are not in the dataset: {names}")
    for n, (training, validation) in enumerate(folds):
        if both := sorted(training & validation):
            raise UsageError(f"{file}: fold {n} trains and validates on {join_first(both)}")
    return folds


def describe_unused(folds: Sequence[Fold], names: Sequence[str]) -> str:
    """Say how many cases the folds leave out, if any."""
    unused = set(names).difference(*(part for fold in folds for part in fold))
    return f", in which {len(unused)} of {len(names)} cases do not occur" if unused else ""


def read_groups(
    group_by: str, names: Sequence[str], key: str = "data.group_by", *, partial: bool = False
) -> dict[str, str]:
    """Return the group of every case: captured from its name, or read from a file.

    If `partial`, other cases than the option was made for are groups of their own.
    """
    if group_by.lower().endswith((".json", ".csv")):
        groups, problem = _read_group_file(Path(group_by), key), f"{group_by} has no group for"
    else:
        problem = f"{key}={group_by!r} captures nothing from"
        try:
            matches = {name: re.search(group_by, name) for name in names}
            groups = {name: match[1] or "" for name, match in matches.items() if match}
        except (re.error, IndexError) as error:
            reason = "no capture group" if isinstance(error, IndexError) else str(error)
            raise UsageError(
                f"{key}={group_by!r}: {reason}; it must be a regular expression with a capture "
                "group, such as 'patient(\\d+)_frame\\d+', or a .json or .csv file of cases and "
                "groups"
            ) from None
    if partial:
        return {name: groups.get(name) or name for name in names}
    if ungrouped := [name for name in names if not groups.get(name)]:
        raise UsageError(
            f"{problem} {len(ungrouped)} of {len(names)} cases: {join_first(ungrouped)}"
        )
    return {name: groups[name] for name in names}


def _read_group_file(file: Path, key: str) -> dict[str, str]:
    """Read {case: group} from a JSON object or a two-column CSV file with or without a header."""
    try:
        if file.suffix.lower() == ".csv":
            text = file.read_text("utf-8-sig")
            rows = csv.reader(text.splitlines(), delimiter=";" if ";" in text else ",")
            pairs = {(case.strip(), group.strip()) for case, group in filter(None, rows)}
        else:
            pairs = {(case, str(group)) for case, group in read_json(file).items()}
    except FileNotFoundError:
        raise UsageError(f"{key}: no file {file.absolute()}") from None
    except (ValueError, AttributeError, csv.Error):
        raise UsageError(
            f"{file} must be a JSON object {{case: group}} or a CSV file with the columns case and "
            "group"
        ) from None
    if twice := [case for case, n in Counter(case for case, _ in pairs).items() if n > 1]:
        raise UsageError(f"{file} has two groups for {join_first(sorted(twice))}")
    return dict(pairs)


def describe_groups(names: Sequence[str], groups: Mapping[str, str] | None) -> str:
    """Describe the number of cases and of groups.

    >>> describe_groups(["a1", "a2", "b1"], {"a1": "a", "a2": "a", "b1": "b"})
    '3 cases in 2 groups'
    """
    cases = pluralize(len(names), "case")
    if groups is None:
        return cases
    return f"{cases} in {pluralize(len({groups[name] for name in names}), 'group')}"


class LikelyGroups(NamedTuple):
    """What names of cases suggest: several scans of each patient."""

    pattern: str  # for data.group_by
    message: str

    @property
    def option(self) -> str:
        """Return what to add to a command, as a shell takes it."""
        return f"data.group_by='{self.pattern}'"


def find_likely_groups(names: Sequence[str]) -> LikelyGroups | None:
    r"""Return the groups of case names that look like several scans per patient.

    >>> find_likely_groups([f"patient00{p}_frame0{f}" for p in (1, 2) for f in (1, 7)]).option
    "data.group_by='(.+)_frame\\d+'"
    """
    parts, patients = list(names), []
    while any(matches := [LAST_PART.fullmatch(part) for part in parts]):
        stems = [m[1] if m else part for m, part in zip(matches, parts, strict=True)]
        scans = Counter(stem for stem, _ in set(zip(stems, parts, strict=True)))
        are_visits = not any(m and m[2] for m in matches)
        # A center or a year has many cases. A patient has few scans, or is named as a patient.
        are_few = all(matches) and len(scans) >= max(scans.values())
        if are_visits or are_few or all(map(PATIENT.fullmatch, scans)):
            patients = stems if 1 < len(scans) < len(names) else patients
        parts = stems
    if not patients:
        return None
    most = Counter(patients).most_common(1)[0][0]
    pairs = list(zip(names, patients, strict=True))
    one, other = [escape_unprintable(name) for name, patient in pairs if patient == most][:2]
    ends = sorted({re.sub(r"\d+", r"\\d+", name[len(patient) :]) for name, patient in pairs})
    return LikelyGroups(
        pattern=f"(.+){ends[0]}" if len(ends) == 1 else f"(.+?)(?:{'|'.join(ends)})$",
        message=f"{len(names)} cases look like scans of {len(set(patients))} patients, "
        f"for example {one} and {other}",
    )
