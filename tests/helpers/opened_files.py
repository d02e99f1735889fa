"""Count how often files are opened."""

import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

HOOKS: list[Callable[[str, tuple[Any, ...]], None]] = []


@contextmanager
def count_openings(root: Path) -> Generator[Counter[Path]]:
    """Yield the number of openings of each file below a folder, while the body runs."""
    opened: Counter[Path] = Counter()

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(f"{root}/"):
            opened[Path(arguments[0])] += 1

    add_audit_hook()
    HOOKS.append(count)
    try:
        yield opened
    finally:
        HOOKS.remove(count)


@cache
def add_audit_hook() -> None:
    """Add a hook that calls HOOKS; Python removes none."""

    def call_all(event: str, arguments: tuple[Any, ...]) -> None:
        for hook in HOOKS:
            hook(event, arguments)

    sys.addaudithook(call_all)
