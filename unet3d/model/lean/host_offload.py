"""Feature maps that wait in the host's memory, and come back a few rows at a time."""

from functools import cache
from math import prod

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from unet3d.model.lean.tiling import MapLayout

CHUNK_BYTES = 4 * 2**20
"""What is copied at a time, for one volume: enough for the bus, little beside a map."""


@cache
def get_copy_stream(device: torch.device) -> torch.cuda.Stream:
    """On which maps leave and come back."""
    return torch.cuda.Stream(device)


class HostMap:
    """A map in pinned memory. It leaves, and comes back, on a stream of its own beside the work.

    On the GPU are the map until it has left, then the chunk that is read with its neighbours.
    Whoever works waits for a copy by the GPU's own clock, and only then lets its memory go: so what
    is there at a time does not depend on how far the host has run ahead.
    """

    def __init__(self, x: Tensor, space: MapLayout):
        self.space, self.channels = space, x.shape[1]
        row = self.channels * prod(space.size) // space.rows * space.dtype.itemsize
        self.step = min(max(1, CHUNK_BYTES // row), space.rows)
        self.chunks: list[list[Tensor]] = []  # of each volume
        self.leaving: list[Tensor] = []
        self.here: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}
        pinned = x.is_cuda or isinstance(x, FakeTensor)
        for start in range(0, space.rows, self.step):
            rows = space.narrow_rows(x, start, min(start + self.step, space.rows))
            # Copies of no more than a view, unless the rows lie within planes.
            parts = [v.contiguous(memory_format=torch.channels_last_3d) for v in rows.split(1)]
            chunk = [torch.empty_like(part, device="cpu", pin_memory=pinned) for part in parts]
            self._copy(parts, chunk)
            self.leaving += parts
            self.chunks.append(chunk)
        self.left = self._mark()

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) in new memory; those after them begin to come."""
        self._leave()
        first, last = start // self.step, (stop - 1) // self.step
        out = self.space.empty(self.channels, stop - start)
        for n in range(first, last + 1):
            for m in [m for m in self.here if not n - 1 <= m <= n + 1]:  # n - 1: slabs overlap
                self._come(m)
                del self.here[m]
            for m in range(n, min(n + 2, len(self.chunks))):
                if m not in self.here:
                    self._begin(m)
            begun = n * self.step
            low, high = max(start, begun), min(stop, begun + self.step)
            part = self.space.narrow_rows(self._come(n), low - begun, high - begun)
            self.space.narrow_rows(out, low - start, high - start).copy_(part)
        if stop == self.space.rows:
            self.here.clear()
        return out

    def _begin(self, n: int) -> None:
        chunk = self.chunks[n]
        block = self.space.empty(self.channels, chunk[0].shape[self.space.axis])
        self._copy(chunk, list(block.split(1)))
        self.here[n] = block, self._mark()

    def _come(self, n: int) -> Tensor:
        block, done = self.here[n]
        self._wait(done)
        return block

    def _leave(self) -> None:
        if self.leaving:
            self._wait(self.left)
            self.leaving.clear()

    def _copy(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        """Once the work so far is done, beside that which is to come."""
        if self.space.device.type != "cuda":
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return
        stream = get_copy_stream(self.space.device)
        stream.wait_stream(torch.cuda.current_stream(self.space.device))
        with torch.cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)

    def _mark(self) -> torch.cuda.Event | None:
        device = self.space.device
        return get_copy_stream(device).record_event() if device.type == "cuda" else None

    def _wait(self, done: torch.cuda.Event | None) -> None:
        if done is not None:
            torch.cuda.current_stream(self.space.device).wait_event(done)
