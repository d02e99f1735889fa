"""Read the Medical Segmentation Decathlon's layout: dataset.json, imagesTr/, labelsTr/."""

from functools import cached_property
from pathlib import Path
from typing import Any

from unet3d.data.case import Case, DatasetDescription
from unet3d.data.findings import Finding
from unet3d.data.formats.volumes import split_suffix
from unet3d.data.layouts.dataset_json import find_problems, load_dataset_json, parse_names
from unet3d.errors import UsageError


class Decathlon:
    """An extracted Decathlon task."""

    def __init__(self, root: str):
        self.root = Path(root)

    @cached_property
    def content(self) -> dict[str, Any]:
        """Return the content of dataset.json."""
        content = load_dataset_json(
            self.root, "a Decathlon task is a folder with dataset.json, imagesTr/ and labelsTr/"
        )
        if "channel_names" in content and "modality" not in content:
            raise UsageError(
                f"{self.root / 'dataset.json'} is that of nnU-Net's raw layout: use data=nnunet"
            )
        return content

    def describe(self) -> DatasetDescription:
        """Return the channels and classes in the order of their numbers."""
        return DatasetDescription(
            channels=parse_names(self.content, "modality", self.root),
            classes=parse_names(self.content, "labels", self.root),
        )

    def list_cases(self) -> list[Case]:
        """Return the training cases, sorted by name."""
        entries = self.content.get("training")
        if not isinstance(entries, list) or not entries:
            raise UsageError(f"{self.root / 'dataset.json'} lists no training cases")
        cases = []
        for entry in entries:
            try:
                image, label = self.root / entry["image"], self.root / entry["label"]
            except (KeyError, TypeError):
                raise UsageError(
                    f"{self.root / 'dataset.json'}: each entry of training needs image and label, "
                    f"got {entry!r}"
                ) from None
            cases.append(Case(name=split_suffix(image)[0], images=(image,), label=label))
        return sorted(cases, key=lambda case: case.name)

    def find_problems(self) -> list[Finding]:
        """Find unlisted files and a wrong numTraining."""
        message = "has no entry in dataset.json"
        return find_problems(self.root, self.content, self.list_cases(), message)
