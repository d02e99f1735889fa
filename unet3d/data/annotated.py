"""Classes that only some cases have annotated, as in partly labeled data sets that are merged.

Where a case has no label, a class that it does not annotate may be: its background gets a label of
its own, below IGNORE_LABEL, for each set of classes that cases do not annotate.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from unet3d.data.case import Finding
from unet3d.data.layouts.dataset_json import load_json_object
from unet3d.errors import UsageError
from unet3d.types import IGNORE_LABEL


@dataclass(frozen=True)
class Annotations:
    """Which classes are annotated in cases whose name matches a pattern; in others, all are.

    `classes` are those of the labels 1, 2, ...
    """

    key: str  # where the config has them
    annotated: Mapping[str, frozenset[str]]  # by pattern; the first that matches counts
    classes: tuple[str, ...]

    @cached_property
    def unknown_classes(self) -> dict[int, tuple[int, ...]]:
        """Return the classes that voxels with a label may be of, besides the background."""
        sets = filter(None, dict.fromkeys(map(self._get_others, self.annotated.values())))
        numbers = {name: label for label, name in enumerate(self.classes, start=1)}
        return {
            IGNORE_LABEL - n: tuple(numbers[name] for name in names)
            for n, names in enumerate(sets, start=1)
        }

    def find_unknown(self, case: str) -> tuple[str, ...]:
        """Return the classes that a case does not annotate."""
        pattern = self._find_pattern(case)
        return () if pattern is None else self._get_others(self.annotated[pattern])

    def get_background_label(self, case: str) -> int:
        """Return the label of voxels that a case does not label."""
        unknown = tuple(self.classes.index(name) + 1 for name in self.find_unknown(case))
        labels = (label for label, classes in self.unknown_classes.items() if classes == unknown)
        return next(labels, 0)

    def find_contradiction(self, case: str, labels: Set[int]) -> str | None:
        """Return what is wrong with the labels that a case has, if anything."""
        unknown = self.find_unknown(case)
        extra = [n for n, name in enumerate(self.classes, 1) if n in labels and name in unknown]
        if not extra:
            return None
        return (
            f"has the label {extra[0]} ({self.classes[extra[0] - 1]}), which {self.key} does not "
            f"list for {self._find_pattern(case)}"
        )

    def find_unmatched_patterns(self, cases: Iterable[str]) -> list[Finding]:
        names, advice = list(cases), "correct the pattern, or remove it"
        return [
            Finding(None, None, f"{self.key} names {pattern}, and no case has such a name", advice)
            for pattern in self.annotated
            if not any(fnmatchcase(name, pattern) for name in names)
        ]

    def _find_pattern(self, case: str) -> str | None:
        return next((p for p in self.annotated if fnmatchcase(case, p)), None)

    def _get_others(self, annotated: frozenset[str]) -> tuple[str, ...]:
        return tuple(name for name in self.classes if name not in annotated)


def read_annotations(key: str, value: Any, classes: Sequence[str]) -> Annotations:
    """Read patterns of names and their foreground classes, or a JSON file of these."""
    if isinstance(value, str):
        file = Path(value)
        value = load_json_object(file, f"{key}: no file {file.absolute()}")
    if not isinstance(value, Mapping) or not value:
        raise UsageError(
            f"{key} must be patterns of case names with the classes that they annotate, as in "
            f"{key}={{liver_*:[liver]}}, or a JSON file of these; got {value!r}"
        )
    annotated = {}
    for pattern, given in value.items():
        names = given if isinstance(given, list) else [given]
        for name in names:
            if name not in classes:
                raise UsageError(
                    f"{key}: {pattern} must list classes of {', '.join(classes)}, got {name!r}"
                )
        annotated[str(pattern)] = frozenset(names)
    return Annotations(key, annotated, tuple(classes))
