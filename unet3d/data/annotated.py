"""Classes that only some cases have annotated, as in partly labeled data sets that are merged.

Background of such a case may belong to a class that was not annotated in it. It gets a label of its
own below IGNORE_LABEL, one for each set of classes that cases do not annotate.
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
from unet3d.text import join_first
from unet3d.types import IGNORE_LABEL


@dataclass(frozen=True)
class Annotations:
    """Which classes are annotated in cases whose name matches a pattern; in others, all are."""

    key: str  # where the config has them
    unknown: Mapping[str, tuple[str, ...]]  # the other classes, by pattern; the first match counts
    classes: tuple[str, ...]  # of the labels 1, 2, ...

    @cached_property
    def unannotated_classes(self) -> dict[int, tuple[int, ...]]:
        """Return the classes that may be hidden behind each of these labels of the background."""
        sets = filter(None, dict.fromkeys(self.unknown.values()))
        numbers = {name: label for label, name in enumerate(self.classes, start=1)}
        return {
            IGNORE_LABEL - n: tuple(numbers[name] for name in names)
            for n, names in enumerate(sets, start=1)
        }

    def find_unannotated(self, case: str) -> tuple[str, ...]:
        """Return the classes that a case does not annotate."""
        patterns = (pattern for pattern in self.unknown if fnmatchcase(case, pattern))
        return self.unknown.get(next(patterns, ""), ())

    def get_background_label(self, case: str) -> int:
        """Return the label of voxels that a case does not label."""
        unknown = tuple(self.classes.index(name) + 1 for name in self.find_unannotated(case))
        return next((n for n, classes in self.unannotated_classes.items() if classes == unknown), 0)

    def find_contradictions(self, case: str, labels: Set[int]) -> list[str]:
        """Return a problem for each label that a case has, although it does not annotate it."""
        unknown = self.find_unannotated(case)
        return [
            f"has voxels of {name}, which {self.key} does not list for it"
            for label, name in enumerate(self.classes, 1)
            if label in labels and name in unknown
        ]

    def find_unmatched_patterns(self, cases: Iterable[str]) -> list[Finding]:
        """Name the patterns that no case has, or that earlier ones make useless."""
        names, seen, findings = list(cases), set[str](), list[Finding]()
        for pattern in self.unknown:
            matched = {name for name in names if fnmatchcase(name, pattern)}
            if matched <= seen:
                why = (
                    "whose cases have an earlier one" if matched else "and no case has such a name"
                )
                text = f"{self.key} names {pattern}, {why}"
                findings.append(Finding(None, None, text, "correct the pattern, or remove it"))
            seen |= matched
        return findings


def read_annotations(key: str, value: Any, classes: Sequence[str]) -> Annotations:
    """Read patterns of names and their foreground classes, or a JSON file of these."""
    if isinstance(value, str):
        file = Path(value)
        value = load_json_object(file, f"{key}: no file {file.absolute()}")
        if not value:
            raise UsageError(f"{file} has no patterns of case names with their classes")
    unknown = {}
    for pattern, annotated in value.items():
        names = annotated if isinstance(annotated, list) else [annotated]
        for name in names:
            if name not in classes:
                raise UsageError(
                    f"{key}: {pattern} must list classes of {join_first(classes, 20)}, got {name!r}"
                )
        unknown[str(pattern)] = tuple(name for name in classes if name not in names)
    return Annotations(key, unknown, tuple(classes))
