"""The cases that a run uses: stop at invalid ones, or skip them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from unet3d.data.case import Case, DatasetLayout
from unet3d.data.checks.headers import check_headers
from unet3d.data.config import DataConfig
from unet3d.data.findings import Finding, InvalidDatasetError
from unet3d.data.preprocessing.cache import CachedVolume, preprocess_all
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.machine import get_available_bytes

T = TypeVar("T")


class UsableCases:
    """Cases of a dataset, with what data.invalid_cases says about those that cannot be used."""

    def __init__(self, data: DataConfig, layout: DatasetLayout, channels: Sequence[str]):
        self.data = data
        self.cases = layout.list_cases()
        self.skipped: list[Finding] = []
        self.ram = get_available_bytes(torch.device("cpu"))
        findings = check_headers(self.cases, channels=len(channels), ram=self.ram)
        self.handle_findings([*layout.find_problems(), *findings])

    def handle_findings(self, findings: Sequence[Finding]) -> None:
        """Raise, or skip the cases that these findings name."""
        findings = [finding for finding in findings if finding.case is not None]
        if not findings:
            return
        invalid = {finding.case for finding in findings}
        self.cases = [case for case in self.cases if case.name not in invalid]
        if not self.data.skip_invalid_cases or not self.cases:
            raise InvalidDatasetError(findings)
        self.skipped += findings

    def run_on_valid_cases(self, work: Callable[[list[Case]], T]) -> T:
        """Call `work` with the valid cases, again without those that it finds to be invalid."""
        while True:  # other problems may be found in the cases that are left
            count = len(self.cases)
            try:
                return work(self.cases)
            except InvalidDatasetError as error:
                self.handle_findings(error.findings)
                if len(self.cases) == count:
                    raise

    def preprocess(
        self, parts: Sequence[Sequence[Case]], preprocessing: Preprocessing
    ) -> tuple[list[CachedVolume], ...]:
        """Return the preprocessed volumes of each part of the cases."""
        wanted = {case.name for part in parts for case in part}

        def work(cases: list[Case]) -> list[CachedVolume]:
            usable = [case for case in cases if case.name in wanted]
            return preprocess_all(usable, preprocessing, self.data.cache, ram=self.ram)

        volumes = {volume.name: volume for volume in self.run_on_valid_cases(work)}
        return tuple([volumes[c.name] for c in part if c.name in volumes] for part in parts)
