"""Faults of a data set, collected so that all of them are known before anything stops."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from unet3d.errors import UsageError

T = TypeVar("T")

SHOWN = 20
"""Faults that stop a run are listed up to this number; `unet3d check` lists all."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault, for the person who can mend it."""

    case: str | None  # None: it harms no case, only the set
    file: Path | None  # None: `what` names it, or it is in no single file
    what: str
    do: str
    hint: bool = False  # worth knowing, and no fault

    def message(self) -> str:
        """Where and what, in one line."""
        file = "" if self.file is None else f"{self.file} "
        return f"{self.case or 'the data set'}: {file}{' '.join(self.what.split())}"


class InvalidDatasetError(UsageError):
    """Cases cannot be used: one line for each fault."""

    def __init__(self, findings: Sequence[Finding]):
        self.findings = list(findings)
        more = len(findings) - SHOWN
        super().__init__(
            "\n".join(
                [
                    f"{count_findings(findings)}; data.invalid_cases=skip leaves such cases out, "
                    "unet3d check says what to do",
                    *(f"  {finding.message()}" for finding in findings[:SHOWN]),
                    *([f"  and {more} more"] if more > 0 else []),
                ]
            )
        )


def count_findings(findings: Sequence[Finding]) -> str:
    """How many faults in how many cases.

    >>> count_findings([Finding(case="a", file=None, what="is empty", do="")])
    '1 fault in 1 case'
    """
    cases = len({finding.case for finding in findings} - {None})
    faults = f"{len(findings)} fault" + "s" * (len(findings) != 1)
    return f"{faults} in {cases} case{'s' * (cases != 1)}" if cases else faults


def collect_findings(
    pool: Executor, work: Callable[[T], object], items: Sequence[T], cases: Sequence[str]
) -> None:
    """Call `work` for every item, then raise Faulty if it refused any; `cases` names the items."""

    def tried(item: T, case: str) -> list[Finding]:
        try:
            work(item)
        except UsageError as refused:
            do = "mend the file, or take the case out"
            return [Finding(case=case, file=None, what=str(refused), do=do)]
        return []

    findings = [f for found in pool.map(tried, items, cases) for f in found]
    if findings:
        raise InvalidDatasetError(findings)
