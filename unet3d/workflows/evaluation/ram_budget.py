"""Memory that threads share."""

from collections.abc import Generator
from contextlib import contextmanager
from threading import Condition


class RamBudget:
    """Bytes that threads may use together; None if any number."""

    def __init__(self, size: int | None = None):
        self.size = size
        self.used = 0
        self._changed = Condition()

    @contextmanager
    def reserve(self, count: int) -> Generator[None]:
        """Wait until `count` bytes, which the budget must have, are free; release them later."""
        with self._changed:
            self._changed.wait_for(lambda: self.size is None or self.used + count <= self.size)
            self.used += count
        try:
            yield
        finally:
            with self._changed:
                self.used -= count
                self._changed.notify_all()
