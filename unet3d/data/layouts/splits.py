"""Split cases into training and validation."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.case import Case
from unet3d.errors import UsageError
from unet3d.files import read_json
from unet3d.text import join_first, pluralize

NUM_FOLDS = 5
SEED = 12345

Fold = tuple[set[str], set[str]]
"""The names of the training and the validation cases."""


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
    if file is not None:
        folds = read_folds(file, [case.name for case in ordered])
        if not 0 <= fold < len(folds):
            raise UsageError(
                f"fold must be 0..{len(folds) - 1}, the folds of {file}, or none, got {fold}"
            )
        training, validation = ([c for c in ordered if c.name in names] for names in folds[fold])
        parts = training, validation
        if groups is not None:
            _check_groups(parts, groups, fold, file)
        return parts
    if not 0 <= fold < NUM_FOLDS:
        raise UsageError(f"fold must be 0..{NUM_FOLDS - 1} or none, got {fold}")
    units = list(range(len(ordered)))  # the index of each case, or of its group
    if groups is not None:
        indices = {group: n for n, group in enumerate(sorted({groups[c.name] for c in ordered}))}
        units = [indices[groups[case.name]] for case in ordered]
    problem = find_too_few([case.name for case in ordered], groups)
    if problem is not None:
        raise UsageError(problem)
    count = len(set(units))
    order = np.arange(count)
    np.random.RandomState(SEED).shuffle(order)
    held_out = set(np.array_split(order, NUM_FOLDS)[fold].tolist())
    parts: tuple[list[Case], list[Case]] = [], []
    for case, unit in zip(ordered, units, strict=True):
        parts[unit in held_out].append(case)
    return parts


def find_too_few(names: Collection[str], groups: Mapping[str, str] | None) -> str | None:
    """Return why cases, or their groups, cannot be split into folds.

    >>> find_too_few(["a", "b"], None)
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


def _check_groups(
    parts: tuple[list[Case], list[Case]], groups: Mapping[str, str], fold: int, file: Path
) -> None:
    training, validation = ({groups[c.name]: c.name for c in part} for part in parts)
    for group in sorted(training.keys() & validation.keys()):
        raise UsageError(
            f"{file}: fold {fold} trains on {training[group]} and validates on "
            f"{validation[group]}, but data.group_by puts both in group {group}: move one of them, "
            "or remove data.splits or data.group_by"
        )


def _read_names(names: Any) -> set[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("not a list of names")
    return set(names)


def read_folds(file: Path, cases: Sequence[str]) -> list[Fold]:
    """Read a JSON list with {"train": [names], "val": [names]} per fold."""
    try:
        folds = [(_read_names(part["train"]), _read_names(part["val"])) for part in read_json(file)]
    except FileNotFoundError:
        raise UsageError(f"data.splits: no file {file.absolute()}") from None
    except (OSError, ValueError, TypeError, KeyError):
        raise UsageError(
            f'{file} must be a JSON list with {{"train": [names], "val": [names]}} per fold'
        ) from None
    if not folds:
        raise UsageError(f"{file} lists no folds")
    unknown = sorted({name for fold in folds for part in fold for name in part}.difference(cases))
    if unknown:
        raise UsageError(f"{file} names cases that are not in the dataset: {join_first(unknown)}")
    for n, (training, validation) in enumerate(folds):
        if training & validation:
            both = sorted(training & validation)
            raise UsageError(f"{file}: fold {n} trains and validates on {join_first(both)}")
        if not training:
            raise UsageError(f"{file}: fold {n} has no training cases")
    return folds
