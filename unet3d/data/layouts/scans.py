"""Find the scans to segment in a file or a folder of images."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from unet3d.data.formats.dicom import is_series
from unet3d.data.formats.hdf5 import split_array
from unet3d.data.formats.ome_zarr import OmeZarr, is_within_zarr
from unet3d.data.formats.volumes import (
    SEG_SUFFIX,
    SUFFIX_LIST,
    advise_conversion,
    describe_nested_series,
    is_volume,
    list_volumes,
    split_suffix,
)
from unet3d.errors import UsageError
from unet3d.text import join_first

NUMBERED = re.compile(r"(.+)_(\d{4})")
"""nnU-Net's names of a case's channels: name_0000, name_0001, ..."""


@dataclass(frozen=True, kw_only=True)
class ScanFiles:
    """The images of a scan: one per channel, or one with all channels. They may be missing."""

    name: str
    files: tuple[Path, ...]

    @property
    def suffix(self) -> str:
        """Return the suffix of labels in the format of the first file."""
        if is_within_zarr(self.files[0]):  # an image within one has no suffix of its own
            return OmeZarr.suffixes[0]
        suffix = split_suffix(self.files[0])[1]
        return {"": SEG_SUFFIX, ".mhd": ".mha"}.get(suffix, suffix)  # .mhd would be two files


def find_scans(source: Path, channels: Sequence[str]) -> list[ScanFiles]:
    """Return the scans of a folder, sorted by name, or the scan that a file belongs to."""
    if not split_array(source)[0].exists():
        raise UsageError(f"no file or folder of scans at {source.absolute()}")
    if source.is_dir() and not is_volume(source):
        scans = group_channels(list_volumes(source), len(channels))
        if not scans:
            others = sorted(path.name for path in source.iterdir())
            advice = next(filter(None, map(advise_conversion, others)), "")
            advice = describe_nested_series(source) or advice
            deeper = sorted({p.parent for p in source.glob("*/*") if p.is_file() and is_volume(p)})
            if deeper and not advice:
                advice = f": name one of its folders that hold scans, such as {deeper[0]}"
            raise UsageError(
                f"no {SUFFIX_LIST}, nor a folder of DICOM images, in {source.absolute()}{advice}"
            )
        return scans
    if is_series(source) and (nested := describe_nested_series(source)):
        raise UsageError(f"{source} has DICOM images of its own, move them to a folder{nested}")
    if not is_volume(source):
        advice = advise_conversion(source.name)
        raise UsageError(f"{source} must be a folder of scans, or end in {SUFFIX_LIST}{advice}")
    if len(channels) == 1:
        return group_channels([source], 1)
    named = NUMBERED.fullmatch(split_suffix(source)[0])
    others = list_volumes(source.parent) if named else []
    same = [o for o in others if split_suffix(o)[0].rpartition("_")[0] == (named and named[1])]
    scans = group_channels(same or [source], len(channels))
    return [scan for scan in scans if source in scan.files]


def describe_ignored(source: Path) -> str | None:
    """Say what in a folder is not segmented; None if there is nothing."""
    if not source.is_dir() or is_volume(source):
        return None
    others = sorted(path.name for path in source.glob("[!.]*") if not is_volume(path))
    if not others:
        return None
    kinds = f"not named {SUFFIX_LIST}, nor folders of DICOM images"
    return f"{source}: ignoring {join_first(others)}: {kinds}"


def group_channels(images: Sequence[Path], channels: int) -> list[ScanFiles]:
    """Group images by scan.

    `name_0000` is channel 0 of `name`. With one channel, a number belongs to the name if several
    images share that name (patient_0000, patient_0001, ...). With several channels, an image
    without a number, or whose scan has no channel 0, must hold all channels.
    """
    numbered: dict[str, dict[int, Path]] = defaultdict(dict)
    whole = []
    for image in images:
        if match := NUMBERED.fullmatch(split_suffix(image)[0]):
            other = numbered[match[1]].setdefault(int(match[2]), image)
            if other != image:
                raise UsageError(f"{other} and {image} are the same channel of {match[1]}")
        else:
            whole.append(image)
    scans = []
    for name, files in numbered.items():
        if 0 not in files or (channels == 1 and len(files) > 1):
            whole += files.values()
            continue
        suffix = split_suffix(files[0])[1]
        names = (f"{name}_{n:04d}{suffix}" for n in range(max(channels, max(files) + 1)))
        channel_files = (files.get(n, files[0].with_name(file)) for n, file in enumerate(names))
        scans.append(ScanFiles(name=name, files=tuple(channel_files)))
    scans += [ScanFiles(name=split_suffix(image)[0], files=(image,)) for image in whole]
    scans.sort(key=lambda scan: scan.name)
    for scan, other in pairwise(scans):
        if scan.name == other.name:
            both = f"{scan.files[0]} and {other.files[0]}"
            raise UsageError(f"{both} have the same case name {scan.name}")
    return scans
