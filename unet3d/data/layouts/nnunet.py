"""Read nnU-Net v2's raw layout: dataset.json, imagesTr/<case>_0000.nii.gz, labelsTr/."""

import os
import re

from unet3d.data.case import Case, DatasetDescription, Finding
from unet3d.data.formats.volumes import SUFFIX_LIST, SUFFIXES, list_volumes
from unet3d.data.layouts.dataset_json import DatasetJson
from unet3d.errors import UsageError


class NnUnet(DatasetJson):
    """A dataset folder of nnUNet_raw, with one file per channel."""

    kind = "an nnU-Net raw dataset is a folder Dataset..._..."
    channels_key = "channel_names"

    @property
    def channels(self) -> tuple[str, ...]:
        return self.parse_names("channel_names")

    @property
    def suffix(self) -> str:
        """Return the ending of all files."""
        suffix = self.content.get("file_ending")
        if suffix not in SUFFIXES:
            raise UsageError(f"{self.file}: file_ending must be {SUFFIX_LIST}, got {suffix!r}")
        return suffix

    def describe(self) -> DatasetDescription:
        """Return channels, classes, regions (labels that are lists), and the ignore label.

        Predictions have the labels of `regions_class_order`. Labels that occur only in regions
        have no name and are called class_1, ...
        """
        labels = self._parse_labels()
        ignore_labels = labels.pop("ignore", ())
        name_by_label = {values[0]: name for name, values in labels.items() if len(values) == 1}
        last = max(value for values in labels.values() for value in values)
        regions = None
        if any(len(values) > 1 for values in labels.values()):
            regions = {name: values for name, values in labels.items() if values != (0,)}
        order = self.content.get("regions_class_order") if regions else None
        return DatasetDescription(
            channels=self.channels,
            classes=tuple(name_by_label.get(n, f"class_{n}") for n in range(last + 1)),
            regions=regions,
            region_labels=None if order is None else tuple(order),
            ignore_labels=ignore_labels,
        )

    def list_cases(self) -> list[Case]:
        """Return the cases that dataset.json lists, or all in imagesTr and labelsTr, by name."""
        if "dataset" in self.content:
            return self._parse_cases()
        suffix, channels = self.suffix, len(self.channels)
        images, labels = self.root / "imagesTr", self.root / "labelsTr"
        pattern = re.compile(rf"(.+)_\d{{4}}{re.escape(suffix)}")
        matches = [pattern.fullmatch(file.name) for file in list_volumes(images)]
        names = {match[1] for match in matches if match}
        if not names:
            raise UsageError(f"{images} holds no images named <case>_0000{suffix}")
        files = [file.name for file in list_volumes(labels)]
        names |= {name.removesuffix(suffix) for name in files if name.endswith(suffix)}
        return [
            Case(
                name=name,
                images=tuple(images / f"{name}_{n:04d}{suffix}" for n in range(channels)),
                label=labels / f"{name}{suffix}",
            )
            for name in sorted(names)
        ]

    def _parse_cases(self) -> list[Case]:
        """Return the cases of the key "dataset", which leaves out other files of the folders."""
        listed = self.content["dataset"]
        try:
            return [
                Case(
                    name=name,
                    images=tuple(self.root / os.path.expandvars(f) for f in files["images"]),
                    label=self.root / os.path.expandvars(files["label"]),
                )
                for name, files in sorted(listed.items())
            ]
        except (AttributeError, KeyError, TypeError):
            raise UsageError(
                f'{self.file}: dataset must be {{case: {{"images": [...], "label": ...}}}}, got '
                f"{str(listed)[:80]}"
            ) from None

    def find_problems(self) -> list[Finding]:
        if "dataset" in self.content:
            return []
        last = len(self.channels) - 1
        message = f"is not <case>_NNNN{self.suffix} with a channel 0000..{last:04d}"
        return self.find_unlisted_files(self.list_cases(), message)

    def _parse_labels(self) -> dict[str, tuple[int, ...]]:
        """Return the labels of each name; background is 0, and no number is left out."""
        labels = self.content.get("labels")
        named: dict[str, tuple[int, ...]] = {}
        if isinstance(labels, dict):
            named = {n: tuple(v) if isinstance(v, list) else (v,) for n, v in labels.items()}
        used = {v for name, values in named.items() if name != "ignore" for v in values}
        single = [values[0] for values in named.values() if len(values) == 1]
        ignored, background = named.get("ignore", (len(used),)), named.get("background", (0,))
        is_numbered = len(used) > 1 and used == set(range(len(used))) and background == (0,)
        if (
            not is_numbered
            or len({*single}) < len(single)
            or len(ignored) != 1
            or used & {*ignored}
        ):
            raise UsageError(
                f"{self.file}: labels must name background 0 and every number up "
                "to the highest (also unused ones), once or within a list, as in "
                f"{{'background': 0, 'tumor': [1, 2], 'core': 2}}; got {labels!r}"
            )
        return named
