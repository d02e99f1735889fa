"""Split cases into training and validation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.case import Case
from unet3d.errors import UsageError
from unet3d.json_file import read_json
from unet3d.text import join_first

NUM_FOLDS = 5
SEED = 12345


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
        parts = _read_splits_file(ordered, fold, file)
        if groups is not None:
            _check_groups(parts, groups, fold, file)
        return parts
    if not 0 <= fold < NUM_FOLDS:
        raise UsageError(f"fold must be 0..{NUM_FOLDS - 1} or none, got {fold}")
    units = list(range(len(ordered)))  # the index of each case, or of its group
    if groups is not None:
        indices = {group: n for n, group in enumerate(sorted({groups[c.name] for c in ordered}))}
        units = [indices[groups[case.name]] for case in ordered]
    count = len(set(units))
    if count < NUM_FOLDS:
        unit = "cases" if groups is None else "groups"
        raise UsageError(
            f"{count} {unit} are too few for {NUM_FOLDS} folds: use fold=none to train on all"
        )
    order = np.arange(count)
    np.random.RandomState(SEED).shuffle(order)
    held_out = set(np.array_split(order, NUM_FOLDS)[fold].tolist())
    parts: tuple[list[Case], list[Case]] = [], []
    for case, unit in zip(ordered, units, strict=True):
        parts[unit in held_out].append(case)
    return parts


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


def _read_splits_file(
    cases: Sequence[Case], fold: int, file: Path
) -> tuple[list[Case], list[Case]]:
    """Read a fold from a JSON list with {"train": [names], "val": [names]} per fold."""
    try:
        parts = read_json(file)
        folds = [(_read_names(part["train"]), _read_names(part["val"])) for part in parts]
    except FileNotFoundError:
        raise UsageError(f"data.splits: no file {file.absolute()}") from None
    except (OSError, ValueError, TypeError, KeyError):
        raise UsageError(
            f'{file} must be a JSON list with {{"train": [names], "val": [names]}} per fold'
        ) from None
    if not folds:
        raise UsageError(f"{file} lists no folds")
    if not 0 <= fold < len(folds):
        raise UsageError(
            f"fold must be 0..{len(folds) - 1}, the folds of {file}, or none, got {fold}"
        )
    training, validation = folds[fold]
    unknown = sorted((training | validation) - {case.name for case in cases})
    if unknown:
        raise UsageError(f"{file} names cases that are not in the dataset: {join_first(unknown)}")
    if training & validation:
        both = sorted(training & validation)
        raise UsageError(f"{file}: fold {fold} trains and validates on {join_first(both)}")
    if not training:
        raise UsageError(f"{file}: fold {fold} has no training cases")
    return [c for c in cases if c.name in training], [c for c in cases if c.name in validation]
