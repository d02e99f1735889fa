"""Keep feature maps in host memory and copy them back a few rows at a time."""

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from unet3d.model.fused.tiling import MapLayout

CHUNK_BYTES = 4 * 2**20
"""Size of a copy for one volume: enough to saturate the bus, small next to a map."""


@cache
def get_copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that copies maps to and from the host."""
    return torch.cuda.Stream(device)


class HostFeatureMap:
    """A map in pinned host memory, copied on a stream of its own, concurrently with the work.

    The GPU holds the map until its copy is done, then the chunk that is read and its neighbors. The
    working stream waits for a copy before its memory is freed, so how much memory is in use does
    not depend on how far the CPU has run ahead of the GPU.
    """

    def __init__(self, x: Tensor, layout: MapLayout):
        self.layout, self.channels = layout, x.shape[1]
        row_bytes = layout.get_row_bytes(self.channels)
        self.step = min(max(1, CHUNK_BYTES // row_bytes), layout.rows)
        self.chunks: list[list[Tensor]] = []  # per chunk, one tensor per volume
        self.in_flight: list[Tensor] = []  # must live until the copy to the host is done
        self.on_device: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}  # by chunk
        pinned = x.is_cuda or isinstance(x, FakeTensor)
        for start in range(0, layout.rows, self.step):
            rows = layout.narrow_rows(x, start, min(start + self.step, layout.rows))
            # Rows along D are views; rows along H are strided and copied here.
            parts = [v.contiguous(memory_format=torch.channels_last_3d) for v in rows.split(1)]
            chunk = [torch.empty_like(part, device="cpu", pin_memory=pinned) for part in parts]
            self._copy(parts, chunk)
            self.in_flight += parts
            self.chunks.append(chunk)
        self.offloaded = self._record_event()

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) as a new tensor, and prefetch the chunk after them."""
        self._release_source()
        first, last = start // self.step, (stop - 1) // self.step
        out = self.layout.empty(self.channels, stop - start)
        for n in range(first, last + 1):
            for m in [m for m in self.on_device if not n - 1 <= m <= n + 1]:  # n - 1: tiles overlap
                self._wait_for_chunk(m)
                del self.on_device[m]
            for m in range(n, min(n + 2, len(self.chunks))):
                if m not in self.on_device:
                    self._prefetch(m)
            first_row = n * self.step
            low, high = max(start, first_row), min(stop, first_row + self.step)
            part = self.layout.narrow_rows(
                self._wait_for_chunk(n), low - first_row, high - first_row
            )
            self.layout.narrow_rows(out, low - start, high - start).copy_(part)
        if stop == self.layout.rows:
            self.on_device.clear()
        return out

    def _prefetch(self, n: int) -> None:
        chunk = self.chunks[n]
        block = self.layout.empty(self.channels, chunk[0].shape[self.layout.axis])
        self._copy(chunk, list(block.split(1)))
        self.on_device[n] = block, self._record_event()

    def _wait_for_chunk(self, n: int) -> Tensor:
        block, done = self.on_device[n]
        self._wait(done)
        return block

    def _release_source(self) -> None:
        if self.in_flight:
            self._wait(self.offloaded)
            self.in_flight.clear()

    def _copy(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        """Copy after the work queued so far, concurrently with later work."""
        if self.layout.device.type != "cuda":
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return
        stream = get_copy_stream(self.layout.device)
        stream.wait_stream(torch.cuda.current_stream(self.layout.device))
        with torch.cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)

    def _record_event(self) -> torch.cuda.Event | None:
        device = self.layout.device
        return get_copy_stream(device).record_event() if device.type == "cuda" else None

    def _wait(self, done: torch.cuda.Event | None) -> None:
        if done is not None:
            torch.cuda.current_stream(self.layout.device).wait_event(done)
