"""One patient's images and label, and where they lie."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unet3d.data.findings import Finding


@dataclass(frozen=True, kw_only=True)
class Case:
    """Files of one patient; several images are several channels."""

    name: str
    images: tuple[Path, ...]
    label: Path


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a data set says of itself."""

    channels: tuple[str, ...]
    classes: tuple[str, ...]  # of the labels 0, 1, 2, ...; the background first
    regions: Mapping[str, tuple[int, ...]] | None = None  # overlapping classes made of labels
    ignore_label: int | None = None  # voxels that nobody labelled


class Source(Protocol):
    """A folder in some layout."""

    def describe(self) -> Description: ...

    def cases(self) -> list[Case]:
        """Every case that can be told, whether its files are there or not."""
        ...

    def faults(self) -> list[Finding]:
        """Entries that are no case, and files that no case names."""
        ...
