"""Read dataset.json of the Decathlon and of nnU-Net, and find files that it does not list."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unet3d.data.case import Case, Finding
from unet3d.data.formats.volumes import MAX_LABEL, list_volumes
from unet3d.errors import UsageError
from unet3d.files import read_json

LAYOUTS = {
    "modality": "a Decathlon task: use data=decathlon; a dataset of nnU-Net 1 is converted by "
    "nnUNetv2_convert_old_nnUNet_dataset",
    "channel_names": "nnU-Net's raw layout: use data=nnunet",
}
"""The key under which a layout names the channels, and what to do about it in another one."""


class DatasetJson:
    """A folder with dataset.json, imagesTr/ and labelsTr/."""

    kind: str  # what a folder in a layout is
    channels_key: str  # the key under which it names the channels

    def __init__(self, root: str):
        self.root = Path(root)
        self.file = self.root / "dataset.json"

    @cached_property
    def content(self) -> dict[str, Any]:
        """Return the object in dataset.json."""
        content = load_json_object(
            self.file,
            f"data.root: no {'dataset.json in' if self.root.is_dir() else 'folder'} "
            f"{self.root.absolute()}; {self.kind} with dataset.json, imagesTr/ and labelsTr/",
        )
        for key, advice in LAYOUTS.items():
            if self.channels_key not in content and key in content:
                raise UsageError(f"{self.file} is that of {advice}")
        return content

    def parse_names(self, key: str) -> tuple[str, ...]:
        """Return the names in {"0": name, "1": name, ...} by number."""
        names = self.content.get(key)
        try:
            numbered = {int(number): str(name) for number, name in dict(names or {}).items()}
        except (TypeError, ValueError):
            numbered = {}
        if not numbered or sorted(numbered) != list(range(len(numbered))):
            raise UsageError(
                f"{self.file}: {key} must name 0, 1, 2, ... without gaps (also unused ones), "
                f"got {names!r}"
            )
        return tuple(numbered[n] for n in sorted(numbered))

    def find_unlisted_files(self, cases: Sequence[Case], message: str) -> list[Finding]:
        """Find volumes in imagesTr and labelsTr that belong to no case, and a wrong numTraining."""
        listed = {os.path.realpath(file) for case in cases for file in (*case.images, case.label)}
        advice = "add it to the dataset, or move it out of the folder"
        findings = [
            Finding(None, file, message, advice)
            for folder in (self.root / "imagesTr", self.root / "labelsTr")
            for file in list_volumes(folder)
            if os.path.realpath(file) not in listed
        ]
        declared = self.content.get("numTraining", len(cases))
        if declared != len(cases):
            message = f"declares numTraining {declared!r}, but has {len(cases)} cases"
            advice = "correct numTraining, or add the missing cases"
            findings.append(Finding(None, self.file, message, advice))
        return findings


def load_json_object(path: Path, missing: str) -> dict[str, Any]:
    """Return the object in a file; `missing` is the error if there is no file."""
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(missing) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold one JSON object")
    return content


@dataclass(frozen=True, kw_only=True)
class LabelNames:
    """Foreground classes and their labels; classes may overlap."""

    classes: Mapping[str, tuple[int, ...]]
    known_labels: frozenset[int] | None  # labels that a file may hold; None: any
    ignore_labels: tuple[int, ...] = ()

    def ignore(self, labels: Iterable[int], kept: Collection[int] = ()) -> "LabelNames":
        """Ignore more labels, but for those that are kept; their classes are left out."""
        more, known = set(labels).difference(kept), self.known_labels
        return LabelNames(
            classes={name: own for name, own in self.classes.items() if not more.issuperset(own)},
            known_labels=None if known is None else known - more,
            ignore_labels=tuple(sorted({*self.ignore_labels, *more})),
        )

    def __post_init__(self):
        for name, labels in self.classes.items():
            if not labels or not all(0 < label <= MAX_LABEL for label in labels):
                raise UsageError(f"class {name}: labels must be 1..{MAX_LABEL}, got {list(labels)}")


def find_label_names(folder: Path) -> LabelNames | None:
    """Read dataset.json in the folder of labels or its parent; return None if there is none.

    The Decathlon writes {"1": "liver"}, nnU-Net {"liver": 1, "all": [1, 2], "ignore": 3}.
    """
    files = (parent / "dataset.json" for parent in (folder, folder.absolute().parent))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    try:
        content = read_json(file)["labels"]
        by_number = all(str(key).lstrip("-").isdigit() for key in content)
        pairs = [(v, k) if by_number else (k, v) for k, v in content.items()]
        named = {
            str(name): tuple(map(int, labels if isinstance(labels, list) else [labels]))
            for name, labels in pairs
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file}: labels cannot be read ({error!r}); set classes=[background, ...]"
        ) from None
    classes = {k: v for k, v in named.items() if k != "ignore" and v != (0,)}
    if len(named) < len(pairs) or not classes:
        raise UsageError(f"{file}: labels must name each class once; set classes=[background, ...]")
    known = frozenset(label for labels in named.values() for label in labels) | {0}
    return LabelNames(classes=classes, known_labels=known, ignore_labels=named.get("ignore", ()))
