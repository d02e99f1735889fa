"""Which cases train and which validate."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from unet3d.data.case import Case
from unet3d.errors import UsageError

FOLDS = 5
SEED = 12345


def split_cases(
    cases: Sequence[Case],
    fold: int | None,
    file: Path | None = None,
    groups: Mapping[str, str] | None = None,
) -> tuple[list[Case], list[Case]]:
    """(training, validation) of a fold; None trains on every case.

    Without a file the folds 0..4 are nnU-Net's, which shuffles the sorted names with seed 12345
    and cuts them in five; which cases a fold holds depends on the names alone. With the group of
    every case it is the sorted groups that are shuffled and cut, and a file that splits a group is
    refused.
    """
    ordered = sorted(cases, key=lambda case: case.name)
    if fold is None:
        return ordered, []
    if file is not None:
        parts = _told(ordered, fold, file)
        if groups is not None:
            _refuse_split_group(parts, groups, fold, file)
        return parts
    if not 0 <= fold < FOLDS:
        raise UsageError(f"fold must be 0..{FOLDS - 1} or none, got {fold}")
    units = list(range(len(ordered)))  # each case's number, or its group's
    if groups is not None:
        numbers = {group: n for n, group in enumerate(sorted({groups[c.name] for c in ordered}))}
        units = [numbers[groups[case.name]] for case in ordered]
    count = len(set(units))
    if count < FOLDS:
        what = "cases" if groups is None else "groups"
        raise UsageError(
            f"{count} {what} are too few for {FOLDS} folds: fold=none trains on all of them"
        )
    order = np.arange(count)
    np.random.RandomState(SEED).shuffle(order)
    held_out = set(np.array_split(order, FOLDS)[fold].tolist())
    parts: tuple[list[Case], list[Case]] = [], []
    for case, unit in zip(ordered, units, strict=True):
        parts[unit in held_out].append(case)
    return parts


def _refuse_split_group(
    parts: tuple[list[Case], list[Case]], groups: Mapping[str, str], fold: int, file: Path
) -> None:
    training, validation = ({groups[c.name]: c.name for c in part} for part in parts)
    for group in sorted(training.keys() & validation.keys()):
        raise UsageError(
            f"{file}: fold {fold} trains on {training[group]} and validates on "
            f"{validation[group]}, which data.group_by puts in one group, {group}: move one of "
            "them, or leave out one of the two keys"
        )


def _told(cases: Sequence[Case], fold: int, file: Path) -> tuple[list[Case], list[Case]]:
    """As a file says: a list with {"train": [names], "val": [names]} for each fold."""
    try:
        folds = [(set(part["train"]), set(part["val"])) for part in json.loads(file.read_text())]
    except FileNotFoundError:
        raise UsageError(f"data.splits: there is no {file.absolute()}") from None
    except (OSError, ValueError, TypeError, KeyError):
        raise UsageError(
            f'{file} must be a JSON list with {{"train": [names], "val": [names]}} for each fold'
        ) from None
    if not 0 <= fold < len(folds):
        raise UsageError(
            f"fold must be 0..{len(folds) - 1}, as {file} has them, or none, got {fold}"
        )
    training, validation = folds[fold]
    unknown = sorted((training | validation) - {case.name for case in cases})
    if unknown:
        raise UsageError(f"{file} names cases that the data set has not: {', '.join(unknown[:5])}")
    if training & validation:
        both = sorted(training & validation)
        raise UsageError(f"{file}: fold {fold} trains and validates on {', '.join(both[:5])}")
    if not training:
        raise UsageError(f"{file}: fold {fold} has no cases to train on")
    return [c for c in cases if c.name in training], [c for c in cases if c.name in validation]
