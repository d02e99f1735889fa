"""Model torch's CUDA caching allocator: what it reserves for a list of allocations.

Sizes are rounded to 512 bytes. Requests up to 1 MiB come from segments of 2 MiB, larger ones from
segments of 20 MiB, and those from 10 MiB on have segments of their own, rounded to 2 MiB. The best
fitting free block is split; adjacent free blocks are merged. (See torch's CUDACachingAllocator.cpp:
one stream, and memory that is never released.)
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unet3d.memory.allocator_settings import AllocatorSettings, get_allocator_settings
from unet3d.text import MIB

UNIT = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
UNSPLIT_REST = 20 * MIB
"""What a block above max_split_size may be too large by."""


def round_block_size(nbytes: int) -> int:
    """Return the size of the block for an allocation.

    >>> round_block_size(0), round_block_size(1), round_block_size(513)
    (0, 512, 1024)
    """
    return -(-nbytes // UNIT) * UNIT


class _Block:
    """A block of a segment, free or in use; `left` and `right` are its neighbors in the segment."""

    __slots__ = ("address", "free", "left", "right", "size", "small")

    def __init__(self, size: int, address: int, small: bool):
        self.size, self.address, self.small, self.free = size, address, small, True
        self.left: _Block | None = None
        self.right: _Block | None = None


class CachingAllocator:
    """Allocate and free blocks by key, and record the peaks."""

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self._free_blocks: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._used_blocks: dict[int, _Block] = {}
        self._last_blocks: dict[bool, _Block] = {}  # of expandable segments
        self._top = 0
        self.allocated = self.reserved = 0

    def allocate(self, key: int, nbytes: int) -> int:
        """Allocate a block and return its size: a large one keeps a rest of up to 1 MiB."""
        if nbytes == 0:
            return 0
        size = round_block_size(self.settings.round_request(nbytes))
        small = size <= SMALL
        is_expandable = self.settings.expandable_segments
        reserve = self._expand_segment if is_expandable else self._reserve_segment
        block = self._take_free_block(size, small) or reserve(size, small)
        if self._splits(block, size):
            self._split(block, size)
        block.free = False
        self._used_blocks[key] = block
        self.allocated += block.size
        return block.size

    def _take_free_block(self, size: int, small: bool) -> _Block | None:
        """Return the best fitting free block."""
        free_blocks = self._free_blocks[small]
        at = bisect_left(free_blocks, (size, -1))
        if at == len(free_blocks):
            return None
        if self.settings.expandable_segments:
            # The last block is larger than others: as large as its segment can become.
            is_last = free_blocks[at][2] is self._last_blocks.get(small)
            at += is_last and at + 1 < len(free_blocks)
        limit, found = self.settings.max_split_size, free_blocks[at][0]
        if limit is not None and (found >= limit if size < limit else found >= size + UNSPLIT_REST):
            return None
        return free_blocks.pop(at)[2]

    def _splits(self, block: _Block, size: int) -> bool:
        rest = block.size - size
        if block.small or self.settings.expandable_segments:
            return rest >= UNIT
        limit = self.settings.max_split_size
        return rest > SMALL and (limit is None or size < limit)

    def _split(self, block: _Block, size: int) -> None:
        """Reduce a block to its first bytes, and make the rest a free block."""
        rest = _Block(block.size - size, block.address + size, block.small)
        rest.left, rest.right = block, block.right
        if block.right is not None:
            block.right.left = rest
        block.right, block.size = rest, size
        if self._last_blocks.get(block.small) is block:
            self._last_blocks[block.small] = rest
        self._insert(rest)

    def free(self, key: int) -> None:
        """Return a block to the cache."""
        block = self._used_blocks.pop(key, None)
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        left, right = block.left, block.right
        if left is not None and left.free:
            self._remove(left)
            block = self._merge(left, block)
        if right is not None and right.free:
            self._remove(right)
            block = self._merge(block, right)
        self._insert(block)

    def release_free_segments(self) -> None:
        """Return segments to the driver that have no block in use."""
        for small, free_blocks in self._free_blocks.items():
            for size, _, block in list(free_blocks):
                if block.left is None and block.right is None:
                    self._remove(block)
                    self._last_blocks.pop(small, None)
                    self.reserved -= size

    def _expand_segment(self, size: int, small: bool) -> _Block:
        """Add memory to the end of the pool's only segment; its last block grows if it is free."""
        last = self._last_blocks.get(small)
        if last is not None and last.free:
            self._remove(last)
        else:
            address = 2**50 if last is None else last.address + last.size
            block = _Block(0, address, small)
            block.left = last
            if last is not None:
                last.right = block
            last = self._last_blocks[small] = block
        unit = SMALL_SEGMENT if small else LARGE_SEGMENT
        added = -(-(size - last.size) // unit) * unit
        last.size += added
        self.reserved += added
        return last

    def _reserve_segment(self, size: int, small: bool) -> _Block:
        """Return a block of new memory that is at least as large as `size`."""
        if small:
            segment = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        self.reserved += segment
        self._top += 2**40  # segments are never adjacent
        return _Block(segment, self._top, small)

    def _merge(self, left: _Block, right: _Block) -> _Block:
        left.size += right.size
        left.right = right.right
        if self._last_blocks.get(right.small) is right:
            self._last_blocks[right.small] = left
        if right.right is not None:
            right.right.left = left
        left.free = True
        return left

    def _insert(self, block: _Block) -> None:
        insort(self._free_blocks[block.small], (block.size, block.address, block))

    def _remove(self, block: _Block) -> None:
        free_blocks = self._free_blocks[block.small]
        free_blocks.pop(bisect_left(free_blocks, (block.size, block.address)))


@dataclass(frozen=True)
class Replay:
    """What the allocator had allocated and reserved after each event, and the sizes of blocks."""

    allocated: list[int]
    reserved: list[int]
    block_sizes: list[int]


def replay(events: Iterable[int], sizes: Sequence[int], graph_pool: Sequence[range] = ()) -> Replay:
    """Allocate and free blocks of these sizes; an event is a block's number + 1, or minus that.

    The allocator has the options of PYTORCH_ALLOC_CONF. The events of `graph_pool` allocate from
    the separate memory pool of CUDA graphs; before the first, free segments are released.
    """
    settings = get_allocator_settings()
    default, graphs = CachingAllocator(settings), CachingAllocator(settings)
    result = Replay([], [], [0] * len(sizes))
    in_graph = {event for events_of_pool in graph_pool for event in events_of_pool}
    for number, event in enumerate(events):
        block = abs(event) - 1
        if graph_pool and number == graph_pool[0].start:
            default.release_free_segments()
        if event > 0:
            allocator = graphs if number in in_graph else default
            result.block_sizes[block] = allocator.allocate(block, sizes[block])
        else:
            default.free(block)
            graphs.free(block)  # one of them has it
        result.allocated.append(default.allocated + graphs.allocated)
        result.reserved.append(default.reserved + graphs.reserved)
    return result
