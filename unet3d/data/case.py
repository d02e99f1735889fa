"""Define a case, a dataset's description, the protocol of layouts, and findings about cases."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Protocol, TypeVar

from unet3d.control_groups import count_usable_cores
from unet3d.errors import UsageError
from unet3d.text import escape_unprintable, pluralize

R = TypeVar("R")

PROGRESS_SECONDS = 10

log = logging.getLogger(__name__)

MAX_LISTED = 20  # problems listed by an error; `unet3d check` lists all of them


@dataclass(frozen=True, kw_only=True)
class Case:
    """The files of one case; each image holds one or more channels."""

    name: str  # of the files that are made of it, too
    images: tuple[Path, ...]
    label: Path

    def __post_init__(self) -> None:
        if not self.name or self.name != Path(self.name).name:
            raise UsageError(f"the case name {self.name!r} is no name of a file")


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """The channels and classes that a dataset declares."""

    channels: tuple[str, ...]
    classes: tuple[str, ...]  # names of labels 0, 1, 2, ...; the background comes first
    regions: Mapping[str, tuple[int, ...]] | None = None  # overlapping classes and their labels
    region_labels: tuple[int, ...] | None = None  # that predictions have in each region
    ignore_labels: tuple[int, ...] = ()  # labels of voxels that are not annotated


@dataclass(frozen=True)
class Finding:
    """A problem in a dataset and how to fix it."""

    case: str | None  # None: a problem of the dataset, not of a case
    file: Path | None  # None: `message` names the file, or several files are involved
    message: str
    advice: str
    is_hint: bool = False  # a suggestion, not a problem

    def describe(self) -> str:
        """Return the case, the file and the problem in one line."""
        file = "" if self.file is None else f"{self.file} "
        text = f"{self.case or 'dataset'}: {file}{' '.join(self.message.split())}"
        return escape_unprintable(text)


class DatasetLayout(Protocol):
    """A dataset folder in one of the layouts."""

    def describe(self) -> DatasetDescription: ...

    def list_cases(self) -> list[Case]:
        """Return every case that the layout names; its files may be missing."""
        ...

    def find_problems(self) -> list[Finding]:
        """Return entries that do not form a case and files that belong to no case."""
        ...


class InvalidDatasetError(UsageError):
    """Cases cannot be used: one line per problem."""

    def __init__(self, findings: Sequence[Finding], *, skips: bool = False):
        self.findings = list(findings)
        lines = [f"{count_findings(findings)}; run unet3d check for how to fix them"]
        if skips:
            lines[0] = f"data.invalid_cases=skip leaves no case: {lines[0]}"
        else:
            lines[0] += ", or set data.invalid_cases=skip to skip these cases"
        lines += [f"  {finding.describe()}" for finding in findings[:MAX_LISTED]]
        if len(findings) > MAX_LISTED:
            lines.append(f"  and {len(findings) - MAX_LISTED} more")
        super().__init__("\n".join(lines))


def count_findings(findings: Sequence[Finding]) -> str:
    """Describe the number of problems and of affected cases.

    >>> count_findings([Finding(case="a", file=None, message="is empty", advice="")])
    '1 problem in 1 case'
    """
    cases = len({finding.case for finding in findings} - {None})
    problems = pluralize(len(findings), "problem")
    return f"{problems} in {pluralize(cases, 'case')}" if cases else problems


def run_on_cases(
    work: Callable[[Case], R],
    cases: Sequence[Case],
    *,
    threads: int | None = None,
    doing: str | None = None,
) -> list[R]:
    """Call `work` on every case; return the results, or raise the problems of all cases at once.

    What it is `doing` is logged with the number of cases that are done, where it takes long.
    """
    due = monotonic() + PROGRESS_SECONDS

    def try_case(case: Case) -> R | Finding:
        try:
            return work(case)
        except UsageError as error:
            return Finding(case.name, None, str(error), "fix the file or remove the case")

    results = []
    with ThreadPoolExecutor(threads or count_usable_cores()) as pool:
        for result in pool.map(try_case, cases):
            results.append(result)
            if doing and monotonic() > due:
                log.info("%s: %d of %d cases", doing, len(results), len(cases))
                due = monotonic() + PROGRESS_SECONDS
    if findings := [result for result in results if isinstance(result, Finding)]:
        raise InvalidDatasetError(findings)
    return [result for result in results if not isinstance(result, Finding)]
