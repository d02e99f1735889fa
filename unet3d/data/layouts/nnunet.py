"""The layout of nnU-Net v2's raw data: dataset.json, imagesTr/<case>_0000.nii.gz, labelsTr/."""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from unet3d.data.case import Case, Description
from unet3d.data.findings import Finding
from unet3d.data.layouts.dataset_json import (
    check_num_training,
    list_volumes,
    load_dataset_json,
    names_in_order,
    unlisted_files,
)
from unet3d.errors import UsageError


class NnUnet:
    """A data set's folder in nnUNet_raw; one file for each channel."""

    def __init__(self, root: str):
        self.root = Path(root)

    @cached_property
    def content(self) -> dict[str, Any]:
        """The dataset.json."""
        content = load_dataset_json(
            self.root,
            "nnU-Net's raw data is a folder Dataset..._... with dataset.json, imagesTr/ and "
            "labelsTr/",
        )
        if "dataset" in content:
            raise UsageError(
                f"{self.root / 'dataset.json'}: files elsewhere, listed under dataset, are not "
                "read: link them into imagesTr/ and labelsTr/"
            )
        return content

    def describe(self) -> Description:
        """Channels and classes by number; regions if labels are lists, and the label to ignore.

        Labels that have no name of their own, only a part in regions, are called class_1, ...
        """
        labels = dict(self._labels())
        ignore = labels.pop("ignore", None)
        single = {values[0]: name for name, values in labels.items() if len(values) == 1}
        given = {value for values in labels.values() for value in values}
        last = max(given, default=0)
        twice = len(single) < sum(len(values) == 1 for values in labels.values())
        if given != set(range(last + 1)) or last < 1 or twice or len(ignore or (0,)) != 1:
            raise self._bad_labels()
        regions = None
        if any(len(values) > 1 for values in labels.values()):
            regions = {name: values for name, values in labels.items() if values != (0,)}
        return Description(
            channels=names_in_order(self.content, "channel_names", self.root),
            classes=tuple(single.get(n, f"class_{n}") for n in range(last + 1)),
            regions=regions,
            ignore_label=None if ignore is None else ignore[0],
        )

    def cases(self) -> list[Case]:
        """Every name in imagesTr and labelsTr, by name, with a file for every channel."""
        ending = self._ending()
        channels = len(names_in_order(self.content, "channel_names", self.root))
        image = re.compile(rf"(.+)_\d{{4}}{re.escape(ending)}")
        matches = [image.fullmatch(file.name) for file in list_volumes(self.root / "imagesTr")]
        names = {match[1] for match in matches if match}
        if not names:
            raise UsageError(f"{self.root / 'imagesTr'} holds no images named <case>_0000{ending}")
        labels = list_volumes(self.root / "labelsTr")
        names |= {f.name.removesuffix(ending) for f in labels if f.name.endswith(ending)}
        return [
            Case(
                name=name,
                images=tuple(
                    self.root / "imagesTr" / f"{name}_{channel:04d}{ending}"
                    for channel in range(channels)
                ),
                label=self.root / "labelsTr" / f"{name}{ending}",
            )
            for name in sorted(names)
        ]

    def faults(self) -> list[Finding]:
        """Files that are no channel of a case, a wrong count."""
        cases = self.cases()
        channels = len(cases[0].images)
        why = f"is not <case>_NNNN{self._ending()} with a channel 0000..{channels - 1:04d}"
        return [
            *unlisted_files(self.root, cases, why),
            *check_num_training(self.content, len(cases), self.root),
        ]

    def _ending(self) -> str:
        ending = self.content.get("file_ending")
        if ending not in (".nii", ".nii.gz"):
            raise UsageError(
                f"{self.root / 'dataset.json'}: file_ending must be .nii or .nii.gz, got {ending!r}"
            )
        return ending

    def _labels(self) -> Mapping[str, tuple[int, ...]]:
        try:
            labels = {
                str(name): tuple(value) if isinstance(value, list) else (value,)
                for name, value in self.content["labels"].items()
            }
        except (KeyError, AttributeError):
            raise self._bad_labels() from None
        values = [value for values in labels.values() for value in values]
        if not all(labels.values()) or not all(type(v) is int and v >= 0 for v in values):
            raise self._bad_labels()
        return labels

    def _bad_labels(self) -> UsageError:
        return UsageError(
            f"{self.root / 'dataset.json'}: labels must give background 0 and every number after "
            "it once or as part of a list, as in {'background': 0, 'tumour': [1, 2], 'core': 2}, "
            f"got {self.content.get('labels')!r}"
        )
