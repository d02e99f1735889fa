"""Let a `with` statement replace a property of this machine that an estimate depends on."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class Assumption(Generic[T]):
    """A value to estimate for instead of this machine's.

    >>> memory = Assumption[int]("memory")
    >>> with memory.assume(3):
    ...     memory.get()
    3
    """

    def __init__(self, name: str):
        self._value: ContextVar[T | None] = ContextVar(name, default=None)

    def get(self) -> T | None:
        """Return the value, or None outside of `assume`."""
        return self._value.get()

    @contextmanager
    def assume(self, value: T) -> Generator[None]:
        """Assume the value in the body."""
        token = self._value.set(value)
        try:
            yield
        finally:
            self._value.reset(token)
