"""Define a case, a dataset's description and the protocol of dataset layouts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unet3d.data.findings import Finding


@dataclass(frozen=True, kw_only=True)
class Case:
    """The files of one case; each image holds one or more channels."""

    name: str
    images: tuple[Path, ...]
    label: Path


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """The channels and classes that a dataset declares."""

    channels: tuple[str, ...]
    classes: tuple[str, ...]  # names of labels 0, 1, 2, ...; the background comes first
    regions: Mapping[str, tuple[int, ...]] | None = None  # overlapping classes and their labels
    region_labels: tuple[int, ...] | None = None  # that predictions have in each region
    ignore_labels: tuple[int, ...] = ()  # labels of voxels that are not annotated


class DatasetLayout(Protocol):
    """A dataset folder in one of the layouts."""

    def describe(self) -> DatasetDescription: ...

    def list_cases(self) -> list[Case]:
        """Return every case that the layout names; its files may be missing."""
        ...

    def find_problems(self) -> list[Finding]:
        """Return entries that do not form a case and files that belong to no case."""
        ...
