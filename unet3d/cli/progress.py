"""How far a long job is, on standard error."""

import sys


class Progress:
    """Told what is done and of how much; a line that changes on a terminal, else every tenth."""

    def __init__(self, unit: str):
        self.unit = unit
        self.told = -1

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if sys.stderr.isatty() and self.told >= 0:
            print(file=sys.stderr)

    def __call__(self, done: int, total: int) -> None:
        """Say it, if it is news."""
        steps = 100 if sys.stderr.isatty() else 10
        step = steps * done // total if total else steps
        if step == self.told:
            return
        self.told = step
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{done:,} of {total:,} {self.unit}", end=end, file=sys.stderr, flush=True)
