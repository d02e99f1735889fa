"""Model torch's CUDA caching allocator: what it reserves for a list of allocations.

Sizes are rounded to 512 bytes. Requests up to 1 MiB come from segments of 2 MiB, larger ones from
segments of 20 MiB, and those from 10 MiB on have segments of their own, rounded to 2 MiB. The best
fitting free block is split; adjacent free blocks are merged. (See torch's CUDACachingAllocator.cpp
and AllocatorConfig.cpp: one stream, and memory that is never released.)
"""

import logging
import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from unet3d.text import MIB

UNIT = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
EXPANDABLE_START = {True: 2**50, False: 2**51}
"""Addresses of the expandable segments of small and of other blocks."""

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The second is the older name."""

IGNORED_OPTIONS = re.compile(r"(garbage_collection_threshold|pinned_|graph_capture_|release_lock_)")
"""Options that change neither blocks nor segments of a GPU, unless a process may use only a
fraction of the memory."""

log = logging.getLogger(__name__)


@cache
def parse_allocator_settings(text: str) -> dict[str, bool]:
    """Parse key:value pairs between commas; warn of options that the model does not follow.

    >>> parse_allocator_settings("expandable_segments:True,pinned_num_register_threads:8")
    {'expandable_segments': True}
    """
    settings: dict[str, bool] = {}
    for key, value in re.findall(r"([^,:\[\]]+):(\[[^\]]*\]|[^,]*)", text.replace(" ", "")):
        if key == "expandable_segments":
            settings["expandable_segments"] = value == "True"
        elif not IGNORED_OPTIONS.match(key):
            log.warning("the memory estimate ignores %s:%s of PYTORCH_ALLOC_CONF", key, value)
    return settings


def round_block_size(nbytes: int) -> int:
    """Return the size of the block for an allocation.

    >>> round_block_size(0), round_block_size(1), round_block_size(513)
    (0, 512, 1024)
    """
    return -(-nbytes // UNIT) * UNIT


class CachingAllocator:
    """Allocate and free blocks by key, and record the peaks; a block is an address and its size."""

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.expandable_segments = expandable_segments
        self.used: dict[int, tuple[int, int, bool]] = {}  # by key: address, size, whether small
        self.segments: dict[int, int] = {}  # size by address
        self.free_sizes: dict[int, int] = {}  # of free blocks, by address
        self._free_ends: dict[int, int] = {}  # addresses of free blocks, by end
        self._pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # free, sorted
        self._top = 0
        self.allocated = self.reserved = 0

    def allocate(self, key: int, nbytes: int) -> int:
        """Allocate a block and return its size: a large one keeps a rest of up to 1 MiB."""
        if nbytes == 0:
            return 0
        size = round_block_size(nbytes)
        small = size <= SMALL
        address = self._find_free_block(size, small)
        if address is None:
            reserve = self._expand_segment if self.expandable_segments else self._reserve_segment
            address = reserve(size, small)
        found = self.remove_free(address, small)
        smallest_rest = UNIT if small or self.expandable_segments else SMALL + UNIT
        if found - size >= smallest_rest:
            self.insert_free(address + size, found - size, small)
            found = size
        self.used[key] = address, found, small
        self.allocated += found
        return found

    def free(self, key: int) -> None:
        """Return a block to the cache, merged with its free neighbors in the segment."""
        if key not in self.used:
            return
        address, size, small = self.used.pop(key)
        self.allocated -= size
        left, right = self._free_ends.get(address), address + size
        if left is not None and address not in self.segments:
            size += self.remove_free(left, small)
            address = left
        if right in self.free_sizes and right not in self.segments:
            size += self.remove_free(right, small)
        self.insert_free(address, size, small)

    def release_free_segments(self) -> None:
        """Return segments to the driver that have no block in use."""
        for small, pool in self._pools.items():
            for size, address in list(pool):
                if self.segments.get(address) == size:
                    self.reserved -= self.remove_free(address, small)
                    del self.segments[address]

    def insert_free(self, address: int, size: int, small: bool) -> None:
        insort(self._pools[small], (size, address))
        self.free_sizes[address] = size
        self._free_ends[address + size] = address

    def remove_free(self, address: int, small: bool) -> int:
        """Remove a free block and return its size."""
        size = self.free_sizes.pop(address)
        del self._free_ends[address + size]
        pool = self._pools[small]
        pool.pop(bisect_left(pool, (size, address)))
        return size

    def _find_free_block(self, size: int, small: bool) -> int | None:
        """Return the address of the best fitting free block."""
        pool = self._pools[small]
        at = bisect_left(pool, (size,))
        if at == len(pool):
            return None
        if self.expandable_segments:
            # The last block is larger than others: as large as its segment can become.
            is_last = sum(pool[at]) == self._get_expandable_end(small)
            at += is_last and at + 1 < len(pool)
        return pool[at][1]

    def _reserve_segment(self, size: int, small: bool) -> int:
        """Add a segment of at least `size` as a free block, and return its address."""
        if small:
            segment = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        address = self._place_segment(segment)
        self.segments[address] = segment
        self.reserved += segment
        self.insert_free(address, segment, small)
        return address

    def _place_segment(self, size: int) -> int:
        self._top += 2**40  # far from others
        return self._top

    def _expand_segment(self, size: int, small: bool) -> int:
        """Add memory to the end of the pool's only segment; its last block grows if it is free."""
        end = self._get_expandable_end(small)
        address = self._free_ends.get(end, end)
        last = self.remove_free(address, small) if address < end else 0
        unit = SMALL_SEGMENT if small else LARGE_SEGMENT
        added = -(-(size - last) // unit) * unit
        start = EXPANDABLE_START[small]
        self.segments[start] = self.segments.get(start, 0) + added
        self.reserved += added
        self.insert_free(address, last + added, small)
        return address

    def _get_expandable_end(self, small: bool) -> int:
        start = EXPANDABLE_START[small]
        return start + self.segments.get(start, 0)


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
    settings = parse_allocator_settings(next(filter(None, map(os.environ.get, VARIABLES)), ""))
    default, graphs = CachingAllocator(**settings), CachingAllocator(**settings)
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
