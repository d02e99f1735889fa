"""Split cases into training and validation."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

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
        if groups is not None:
            _check_groups(training, validation, groups, file)
        return training, validation
    if not 0 <= fold < NUM_FOLDS:
        raise UsageError(f"fold must be 0..{NUM_FOLDS - 1} or none, got {fold}")
    problem = find_too_few([case.name for case in ordered], groups)
    if problem is not None:
        raise UsageError(problem)
    groups = groups or {case.name: case.name for case in ordered}
    units = sorted({groups[case.name] for case in ordered})
    order = np.arange(len(units))
    np.random.RandomState(SEED).shuffle(order)
    held_out = {units[n] for n in np.array_split(order, NUM_FOLDS)[fold]}
    parts: tuple[list[Case], list[Case]] = [], []
    for case in ordered:
        parts[groups[case.name] in held_out].append(case)
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
    training: Sequence[Case], validation: Sequence[Case], groups: Mapping[str, str], file: Path
) -> None:
    trained = {groups[case.name]: case.name for case in training}
    for case in validation:
        if (other := trained.get(groups[case.name])) is not None:
            raise UsageError(
                f"{file}: a fold trains on {other} and validates on {case.name}, but data.group_by "
                f"puts both in group {groups[case.name]}: move one of them, or remove data.splits "
                "or data.group_by"
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
    unknown = {name for fold in folds for part in fold for name in part}.difference(cases)
    if unknown:
        names = join_first(sorted(map(str, unknown)))
        raise UsageError(f"{file} names cases that are not in the dataset: {names}")
    for n, (training, validation) in enumerate(folds):
        if training & validation:
            both = sorted(training & validation)
            raise UsageError(f"{file}: fold {n} trains and validates on {join_first(both)}")
        if not training:
            raise UsageError(f"{file}: fold {n} has no training cases")
    return folds
