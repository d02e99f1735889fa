"""A file or a folder of images without labels -> scans to segment."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unet3d.data.layouts.dataset_json import list_volumes
from unet3d.data.nifti.stream import split_nifti_suffix
from unet3d.errors import UsageError

NUMBERED = re.compile(r"(.+)_(\d{4})")
"""How nnU-Net names the channels of a case: name_0000, name_0001, ..."""


@dataclass(frozen=True, kw_only=True)
class ScanFiles:
    """The images of a patient: one per channel, or one with all of them. They may be missing."""

    name: str
    files: tuple[Path, ...]

    @property
    def ending(self) -> str:
        """Of the first file: .nii or .nii.gz."""
        return split_nifti_suffix(self.files[0])[1]


def find_scans(source: Path, channels: Sequence[str]) -> list[ScanFiles]:
    """All scans of a folder by name, or the one that a file belongs to."""
    if source.is_dir():
        found = group_channels(_images(source), len(channels))
        if not found:
            raise UsageError(f"input={source}: there is no .nii or .nii.gz in {source.absolute()}")
        return found
    if not source.is_file():
        raise UsageError(f"input={source}: there is nothing at {source.absolute()}")
    if not split_nifti_suffix(source)[1]:
        raise UsageError(f"input={source} must be a folder, a .nii or a .nii.gz")
    if len(channels) == 1:
        return group_channels([source], 1)
    beside = group_channels(_images(source.parent), len(channels))
    return [scan for scan in beside if source in scan.files]


def group_channels(images: Sequence[Path], channels: int) -> list[ScanFiles]:
    """Images by the scan that they belong to.

    `name_0000` is channel 0 of `name`. With one channel a number belongs to the name if there are
    others of it (patient_0000, patient_0001, ...); with several, an image without a number, or
    without a channel 0 beside it, has to hold all channels.
    """
    numbered: dict[str, dict[int, Path]] = defaultdict(dict)
    found: dict[str, list[ScanFiles]] = defaultdict(list)

    def add(name: str, *files: Path) -> None:
        found[name].append(ScanFiles(name=name, files=files))

    for image in images:
        match = NUMBERED.fullmatch(split_nifti_suffix(image)[0])
        if match:
            twin = numbered[match[1]].setdefault(int(match[2]), image)
            if twin != image:
                raise UsageError(f"input: {twin} and {image} are the same channel of {match[1]}")
        else:
            add(split_nifti_suffix(image)[0], image)
    for name, parts in numbered.items():
        if 0 not in parts or (channels == 1 and len(parts) > 1):
            for image in parts.values():
                add(split_nifti_suffix(image)[0], image)
            continue
        there = parts[0]
        count = max(channels, max(parts) + 1)
        add(name, *(parts.get(n, _channel(there, name, n)) for n in range(count)))
    for name, twins in found.items():
        if len(twins) > 1:
            files = " and ".join(str(twin.files[0]) for twin in twins)
            raise UsageError(f"input: {files} are both called {name}")
    return sorted((twins[0] for twins in found.values()), key=lambda scan: scan.name)


def _channel(beside: Path, name: str, number: int) -> Path:
    return beside.with_name(f"{name}_{number:04d}{split_nifti_suffix(beside)[1]}")


def _images(folder: Path) -> list[Path]:
    return [file for file in list_volumes(folder) if file.is_file()]
