"""Collect the problems of a dataset, so that all of them are reported at once."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from unet3d.errors import UsageError
from unet3d.text import escape_unprintable, pluralize

if TYPE_CHECKING:
    from unet3d.data.case import Case

R = TypeVar("R")

MAX_LISTED = 20  # problems listed by an error; `unet3d check` lists all of them


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


class InvalidDatasetError(UsageError):
    """Cases cannot be used: one line per problem."""

    def __init__(self, findings: Sequence[Finding]):
        self.findings = list(findings)
        lines = [
            f"{count_findings(findings)}; run unet3d check for how to fix them, or set "
            "data.invalid_cases=skip to skip these cases"
        ]
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


def collect_findings(
    work: "Callable[[Case], R]", cases: "Sequence[Case]", *, threads: int | None = None
) -> list[R]:
    """Call `work` on every case; return the results, or raise InvalidDatasetError.

    None: as many threads as cores.
    """

    def try_case(case: "Case") -> R | Finding:
        try:
            return work(case)
        except UsageError as error:
            return Finding(case.name, None, str(error), "fix the file or remove the case")

    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        results = list(pool.map(try_case, cases))
    findings = [result for result in results if isinstance(result, Finding)]
    if findings:
        raise InvalidDatasetError(findings)
    return [result for result in results if not isinstance(result, Finding)]
