"""Replay what the caching allocator of a real GPU has recorded, with the model of it.

The model is right if it places every block at the address that the GPU had.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unet3d.memory.allocator import SMALL, CachingAllocator, _Block, round_block_size

Segment = Sequence[Any]
"""Address, bytes, "small" or "large", and [address, requested bytes] of its live blocks."""
Event = Sequence[Any]
"""Kind, address and bytes: s, a new segment; a, an allocation; f, a free; r or x, a released
segment."""


class PlacedAllocator(CachingAllocator):
    """Places segments at recorded addresses, which depend on the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[tuple[int, int]] = []  # addresses and sizes of the next ones

    def _reserve_segment(self, size: int, small: bool) -> _Block:
        block = super()._reserve_segment(size, small)
        if self.segments and self.segments[0][1] == block.size:
            block.address = self.segments.pop(0)[0]
        return block

    def add_segment(self, start: int, size: int, small: bool, live: list[list[int]]) -> None:
        """Add a segment whose blocks were allocated before the recording began.

        The recording has the bytes that were requested for them, without an unsplit rest of a
        large block. The rest is known only where the next block follows.
        """
        ends = [*(address for address, _ in live), start + size][1:]
        at, left = start, None
        for (address, nbytes), end in zip(live, ends, strict=True):
            block_size = round_block_size(nbytes)
            if not small and 0 < end - address - block_size <= SMALL:
                block_size = end - address
            if address > at:
                left = self._append(at, address - at, small, left, used=False)
            left = self._append(address, block_size, small, left, used=True)
            at = address + block_size
        if at < start + size:
            self._append(at, start + size - at, small, left, used=False)
        self.reserved += size

    def _append(
        self, address: int, size: int, small: bool, left: _Block | None, *, used: bool
    ) -> _Block:
        block = _Block(size, address, small)
        block.left = left
        if left is not None:
            left.right = block
        block.free = not used
        if used:
            self._used_blocks[address] = block
            self.allocated += size
        else:
            self._insert(block)
        return block

    def reveal_rest(self, address: int, known: set[int]) -> None:
        """Enlarge the block before `address` by a rest that the recording does not have.

        `known` are blocks that were allocated during the recording: their sizes are certain.
        """
        for _, start, block in self._free_blocks[False]:
            left, rest = block.left, address - start
            if 0 < rest <= SMALL and left is not None and left.address not in known:
                self._remove(block)
                block.address, block.size = address, block.size - rest
                left.size += rest
                self.allocated += rest
                return self._insert(block)

    def release(self, address: int, size: int) -> None:
        """Return a free segment to the driver."""
        for blocks in self._free_blocks.values():
            for _, start, block in blocks:
                if (start, block.size) == (address, size):
                    self._remove(block)
                    self.reserved -= size
                    return


@dataclass
class AddressReplay:
    """What a replay has found."""

    blocks: int = 0
    misplaced: list[int] = field(default_factory=list)  # numbers of events
    reserved: int = 0


def replay_addresses(before: Sequence[Segment], events: Sequence[Event]) -> AddressReplay:
    """Allocate and free as recorded, and compare the addresses."""
    allocator, found, known = PlacedAllocator(), AddressReplay(), set[int]()
    for start, size, kind, live in before:
        allocator.add_segment(start, size, kind == "small", live)
    for number, (what, address, size) in enumerate(events):
        if what == "s":
            allocator.segments.append((address, size))
        elif what == "a":
            found.blocks += 1
            if place(allocator, size) != address:
                allocator.free(-1)
                allocator.reveal_rest(address, known)
                if place(allocator, size) != address:
                    found.misplaced.append(number)
            block = allocator._used_blocks.pop(-1)
            allocator._used_blocks[address] = block
            known.add(address)
        elif what == "f":
            allocator.free(address)
            known.discard(address)
        else:
            allocator.release(address, size)
    found.reserved = allocator.reserved
    return found


def place(allocator: PlacedAllocator, size: int) -> int:
    """Allocate a block and return its address."""
    allocator.allocate(-1, size)
    return allocator._used_blocks[-1].address
