"""The layout of the Medical Segmentation Decathlon: dataset.json, imagesTr/, labelsTr/."""

from functools import cached_property
from pathlib import Path
from typing import Any

from unet3d.data.case import Case, Description
from unet3d.data.findings import Finding
from unet3d.data.layouts.dataset_json import (
    check_num_training,
    is_printable,
    load_dataset_json,
    names_in_order,
    unlisted_files,
)
from unet3d.errors import UsageError


class Decathlon:
    """A task's folder as it was unpacked."""

    def __init__(self, root: str):
        self.root = Path(root)

    @cached_property
    def content(self) -> dict[str, Any]:
        """The dataset.json."""
        return load_dataset_json(
            self.root, "a Decathlon task is a folder with dataset.json, imagesTr/ and labelsTr/"
        )

    def describe(self) -> Description:
        """Channels and classes, in the order of their numbers."""
        return Description(
            channels=names_in_order(self.content, "modality", self.root),
            classes=names_in_order(self.content, "labels", self.root),
        )

    def cases(self) -> list[Case]:
        """The training cases, by name."""
        found = [case for entry in self._entries() if (case := self._case(entry))]
        if not found:
            raise UsageError(
                f"{self.root / 'dataset.json'} lists no training cases: each entry of training "
                "needs image and label"
            )
        return sorted(found, key=lambda case: case.name)

    def faults(self) -> list[Finding]:
        """Entries without image and label, files without an entry, a wrong count."""
        path = self.root / "dataset.json"
        broken = [
            Finding(
                case=f"training[{n}]",
                file=path,
                what=f"its entry is {entry!r}",
                do="give it an image and a label, or take it out",
            )
            for n, entry in enumerate(self._entries())
            if self._case(entry) is None
        ]
        cases = self.cases()
        return [
            *broken,
            *unlisted_files(self.root, cases, "has no entry in dataset.json"),
            *check_num_training(self.content, len(cases) + len(broken), self.root),
        ]

    def _entries(self) -> list[Any]:
        entries = self.content.get("training", [])
        if not isinstance(entries, list):
            raise UsageError(
                f"{self.root / 'dataset.json'}: training must be a list, got {entries!r}"
            )
        return entries

    def _case(self, entry: Any) -> Case | None:
        try:
            image, label = self.root / entry["image"], self.root / entry["label"]
        except (KeyError, TypeError):
            return None
        if not (is_printable(str(image)) and is_printable(str(label))):
            return None
        name = image.name.removesuffix(".gz").removesuffix(".nii")
        return Case(name=name, images=(image,), label=label)
