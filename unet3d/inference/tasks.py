"""Scans to segment: as they are asked for, and with the plan for it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unet3d.data.formats.hdf5 import split_array
from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.preprocessing.pipeline import PreprocessedScan
from unet3d.data.preprocessing.regions import RegionImage
from unet3d.errors import UsageError
from unet3d.inference.memory_plan import InferencePlan


@dataclass(frozen=True, kw_only=True)
class ScanTask:
    """A scan, and where its labels and probabilities go."""

    scan: ScanFiles
    labels: Path
    probabilities: Path | None

    def __post_init__(self):
        files = [Path(os.path.realpath(split_array(file)[0])) for file in self.scan.files]
        labels = Path(os.path.realpath(self.labels))
        if any(labels in (file, *file.parents) for file in files):  # replaced as a whole
            what = "is" if labels in files else "holds"
            raise UsageError(f"{self.labels} {what} the scan itself: write its labels elsewhere")


@dataclass(frozen=True, kw_only=True)
class PreparedScan:
    """A preprocessed scan and the plan for segmenting it."""

    name: str
    task: ScanTask | None  # None: the labels are not written
    scan: PreprocessedScan
    plan: InferencePlan
    max_ram: int  # peak, including reading and postprocessing
    spare_ram: int  # rest of what a case may take
    memory_summary: str  # one line
    differences: list[str]  # how it differs from the training cases of every network
    origin: Mapping[str, Any] = field(default_factory=dict)  # what its labels are made from

    @property
    def is_stored(self) -> bool:
        """Return whether its voxels and labels stay in their files."""
        return isinstance(self.scan.image, RegionImage)
