"""The cost of a piece of work in bytes; the same type whether it was measured or predicted."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Peaks, in bytes; None where the device does not have such a thing."""

    allocated: int | None = None
    """Tensors, on the GPU."""
    reserved: int | None = None
    """What the caching allocator has taken from the GPU for them."""
    process: int | None = None
    """All that the process holds on the GPU, as nvidia-smi counts it."""
    resident: int | None = None
    """The process's memory on the CPU, as the kernel counts it."""

    def __or__(self, other: "MemoryRecord") -> "MemoryRecord":
        """The peak over two pieces of work, one after the other."""
        mine, yours = asdict(self), asdict(other)
        both = {k: [v for v in (mine[k], yours[k]) if v is not None] for k in mine}
        return MemoryRecord(**{k: max(v) if v else None for k, v in both.items()})

    def known(self) -> dict[str, int]:
        """The figures that this device has."""
        return {k: v for k, v in asdict(self).items() if v is not None}

    @property
    def headline(self) -> int:
        """The one figure to show where there is room for one."""
        return self.allocated if self.allocated is not None else (self.resident or 0)
