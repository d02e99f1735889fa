"""Record memory peaks in bytes, estimated or measured."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Memory peaks in bytes; None where the device has no such figure."""

    allocated: int | None = None
    """Tensors on the GPU."""
    reserved: int | None = None
    """Memory that the caching allocator reserved on the GPU for them."""
    process: int | None = None
    """All memory of the process on the GPU, as nvidia-smi reports it."""
    resident: int | None = None
    """Resident memory of the process, as the operating system reports it."""

    def __or__(self, other: "MemoryRecord") -> "MemoryRecord":
        """Return the peaks over two phases that run one after the other."""
        a, b = asdict(self), asdict(other)
        known = {k: [v for v in (a[k], b[k]) if v is not None] for k in a}
        return MemoryRecord(**{k: max(v) if v else None for k, v in known.items()})

    def known(self) -> dict[str, int]:
        """Return the figures that the device has."""
        return {k: v for k, v in asdict(self).items() if v is not None}

    @property
    def headline(self) -> int | None:
        """Return the figure to show where only one is shown."""
        return self.resident if self.allocated is None else self.allocated
