"""Replay what the caching allocator of a real GPU has recorded, with the model of it.

The model is right if it places every block at the address that the GPU had.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unet3d.memory.allocator import SMALL, CachingAllocator, round_block_size

Segment = Sequence[Any]
"""Address, bytes, "small" or "large", and [address, requested bytes] of its live blocks."""
Event = Sequence[Any]
"""OptionType, address and bytes: s, a new segment; a, an allocation; f, a free; r or x, a released
segment."""


class PlacedAllocator(CachingAllocator):
    """Places segments at recorded addresses, which depend on the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.next_segments: list[tuple[int, int]] = []  # addresses and sizes

    def _place_segment(self, size: int) -> int:
        if self.next_segments and self.next_segments[0][1] == size:
            return self.next_segments.pop(0)[0]
        return super()._place_segment(size)

    def add_segment(self, start: int, size: int, small: bool, live: list[list[int]]) -> None:
        """Add a segment whose blocks were allocated before the recording began.

        The recording has the bytes that were requested for them, without an unsplit rest of a
        large block. The rest is known only where the next block follows.
        """
        self.segments[start] = size
        self.reserved += size
        ends = [*(address for address, _ in live), start + size][1:]
        at = start
        for (address, nbytes), end in zip(live, ends, strict=True):
            block_size = round_block_size(nbytes)
            if not small and 0 < end - address - block_size <= SMALL:
                block_size = end - address
            if address > at:
                self.insert_free(at, address - at, small)
            self.used[address] = address, block_size, small
            self.allocated += block_size
            at = address + block_size
        if at < start + size:
            self.insert_free(at, start + size - at, small)

    def reveal_rest(self, address: int, known: set[int]) -> None:
        """Enlarge the block before `address` by a rest that the recording does not have.

        `known` are blocks that were allocated during the recording: their sizes are certain.
        """
        for key, (start, size, small) in self.used.items():
            end = start + size
            is_followed = end in self.free_sizes and end not in self.segments
            if not small and is_followed and 0 < address - end <= SMALL and start not in known:
                free, rest = self.remove_free(end, small), address - end
                self.insert_free(address, free - rest, small)
                self.used[key] = start, size + rest, small
                self.allocated += rest
                return

    def release(self, address: int, size: int) -> None:
        """Return a free segment to the driver."""
        if self.free_sizes.get(address) == size:
            small = (size, address) in self._pools[True]
            self.reserved -= self.remove_free(address, small)
            del self.segments[address]


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
            allocator.next_segments.append((address, size))
        elif what == "a":
            found.blocks += 1
            if place(allocator, size) != address:
                allocator.free(-1)
                allocator.reveal_rest(address, known)
                if place(allocator, size) != address:
                    found.misplaced.append(number)
            allocator.used[address] = allocator.used.pop(-1)
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
    return allocator.used[-1][0]
