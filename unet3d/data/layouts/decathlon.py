"""Read the Medical Segmentation Decathlon's layout: dataset.json, imagesTr/, labelsTr/."""

from functools import cached_property
from pathlib import Path
from typing import Any

from unet3d.data.case import Case, DatasetDescription, Finding
from unet3d.data.formats.volumes import split_suffix
from unet3d.data.layouts.dataset_json import find_problems, load_dataset_json, parse_names
from unet3d.errors import UsageError


class Decathlon:
    """An extracted Decathlon task."""

    def __init__(self, root: str):
        self.root = Path(root)

    @cached_property
    def content(self) -> dict[str, Any]:
        layout = "a Decathlon task is a folder with dataset.json, imagesTr/ and labelsTr/"
        return load_dataset_json(self.root, "modality", layout)

    def describe(self) -> DatasetDescription:
        return DatasetDescription(
            channels=parse_names(self.content, "modality", self.root),
            classes=parse_names(self.content, "labels", self.root),
        )

    def list_cases(self) -> list[Case]:
        """Return the training cases, sorted by name."""
        file, entries = self.root / "dataset.json", self.content.get("training")
        if not isinstance(entries, list) or not entries:
            raise UsageError(f"{file} lists no training cases")
        cases = []
        for entry in entries:
            try:
                image, label = self.root / entry["image"], self.root / entry["label"]
            except (KeyError, TypeError):
                raise UsageError(
                    f"{file}: each entry of training needs image and label, got {entry!r}"
                ) from None
            cases.append(Case(name=split_suffix(image)[0], images=(image,), label=label))
        return sorted(cases, key=lambda case: case.name)

    def find_problems(self) -> list[Finding]:
        message = "has no entry in dataset.json"
        return find_problems(self.root, self.content, self.list_cases(), message)
