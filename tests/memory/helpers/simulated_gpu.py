"""A GPU whose allocator is the model: it takes snapshots as torch does, of an estimated step."""

from typing import Any

from unet3d.memory.allocator import CachingAllocator, _Block
from unet3d.memory.estimate import MemoryEstimate


class LoggingAllocator(CachingAllocator):
    """Records events in torch's format."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[dict[str, Any]] = []
        self.segments: list[_Block] = []  # the first block of each
        self.requested: dict[int, int] = {}  # by address

    def log(self, action: str, address: int, size: int) -> None:
        self.trace.append({"action": action, "addr": address, "size": size, "stream": 0})

    def _reserve_segment(self, size: int, small: bool) -> _Block:
        block = super()._reserve_segment(size, small)
        self.segments.append(block)
        self.log("segment_alloc", block.address, block.size)
        return block

    def allocate(self, key: int, nbytes: int) -> int:
        size = super().allocate(key, nbytes)
        if size:
            address = self._used_blocks[key].address
            self.requested[address] = nbytes
            self.log("alloc", address, nbytes)
        return size

    def free(self, key: int) -> None:
        block = self._used_blocks.get(key)
        if block is not None:
            self.log("free_requested", block.address, self.requested[block.address])
            self.log("free_completed", block.address, self.requested[block.address])
            super().free(key)


class SimulatedGpu:
    """Runs the steps of an estimate; `sizes` may differ from what was estimated."""

    def __init__(self, estimate: MemoryEstimate, sizes: dict[int, int] | None = None):
        self.estimate, self.allocator = estimate, LoggingAllocator()
        self.sizes = {block.id: block.nbytes for block in estimate.trace.blocks} | (sizes or {})
        self.steps = 0
        start = next(p.start for p in estimate.trace.phases if p.phase == "forward")
        second, self.stop = estimate.steady_step
        self.ranges = [(start, second), (second, self.stop), (second, self.stop)]
        self.run(0, start)
        self.allocator.trace.clear()

    def run(self, start: int, stop: int) -> None:
        for event in self.estimate.trace.events[start:stop]:
            block = abs(event) - 1
            self.allocator.free(block)
            if event > 0:
                self.allocator.allocate(block, self.sizes[block])

    def run_step(self) -> None:
        self.run(*self.ranges[self.steps])
        self.steps += 1

    def reset_peak(self) -> None:
        self.allocator.peak_allocated = self.allocator.allocated

    def take_snapshot(self) -> dict[str, Any]:
        segments = []
        for first in self.allocator.segments:
            blocks, block = [], first
            while block is not None:
                requested = self.allocator.requested.get(block.address, 0)
                state = "inactive" if block.free else "active_allocated"
                blocks.append(
                    {"address": block.address, "requested_size": requested, "state": state}
                )
                last, block = block, block.right
            segments.append(
                {
                    "address": first.address,
                    "total_size": last.address + last.size - first.address,
                    "segment_type": "small" if first.small else "large",
                    "stream": 0,
                    "blocks": blocks,
                }
            )
        return {"segments": segments, "device_traces": [list(self.allocator.trace)]}
