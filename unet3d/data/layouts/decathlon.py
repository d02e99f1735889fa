"""Read the Medical Segmentation Decathlon's layout: dataset.json, imagesTr/, labelsTr/."""

from unet3d.data.case import Case, DatasetDescription, Finding
from unet3d.data.formats.volumes import split_suffix
from unet3d.data.layouts.dataset_json import DatasetJson
from unet3d.errors import UsageError


class Decathlon(DatasetJson):
    """An extracted Decathlon task."""

    kind = "a Decathlon task is a folder"
    channels_key = "modality"

    def describe(self) -> DatasetDescription:
        channels, classes = self.parse_names("modality"), self.parse_names("labels")
        return DatasetDescription(channels=channels, classes=classes)

    def list_cases(self) -> list[Case]:
        """Return the training cases, sorted by name."""
        entries = self.content.get("training")
        if not isinstance(entries, list) or not entries:
            raise UsageError(f"{self.file} lists no training cases")
        cases = []
        for entry in entries:
            try:
                image, label = self.root / entry["image"], self.root / entry["label"]
            except (KeyError, TypeError):
                raise UsageError(
                    f"{self.file}: each entry of training needs image and label, got {entry!r}"
                ) from None
            cases.append(Case(name=split_suffix(image)[0], images=(image,), label=label))
        return sorted(cases, key=lambda case: case.name)

    def find_problems(self) -> list[Finding]:
        return self.find_unlisted_files(self.list_cases(), "has no entry in dataset.json")
