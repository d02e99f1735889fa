"""A model of torch's caching allocator on CUDA: what it reserves for a list of allocations.

Sizes are rounded to 512 bytes; requests to 1 MiB come from segments of 2 MiB, larger ones from
segments of 20 MiB, those from 10 MiB on from segments of their own, rounded to 2 MiB. A free block
is taken by best fit and split; neighbours that are free are joined. (See torch's
CUDACachingAllocator.cpp: one stream, default settings.)
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

from unet3d.units import MIB

UNIT = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB


def round_block_size(nbytes: int) -> int:
    """What an allocation takes.

    >>> round_block_size(1), round_block_size(513)
    (512, 1024)
    """
    return max(UNIT, -(-nbytes // UNIT) * UNIT)


class _Piece:
    """A part of a segment, free or in use; `left` and `right` are its neighbours there."""

    __slots__ = ("address", "free", "left", "right", "size", "small")

    def __init__(self, size: int, address: int, small: bool):
        self.size, self.address, self.small, self.free = size, address, small, True
        self.left: _Piece | None = None
        self.right: _Piece | None = None


class CachingAllocator:
    """Allocate and free by a key; the peaks are kept."""

    def __init__(self) -> None:
        self._idle: dict[bool, list[tuple[int, int, _Piece]]] = {True: [], False: []}
        self._used: dict[int, _Piece] = {}
        self._top = 0
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0

    def allocate(self, key: int, nbytes: int) -> None:
        """Take memory for a block."""
        if nbytes == 0:
            return
        size = round_block_size(nbytes)
        small = size <= SMALL
        idle = self._idle[small]
        at = bisect_left(idle, (size, -1))
        piece = idle.pop(at)[2] if at < len(idle) else self._segment(size, small)
        rest = piece.size - size
        if rest >= UNIT if small else rest > SMALL:
            other = _Piece(rest, piece.address + size, small)
            other.left, other.right = piece, piece.right
            if piece.right is not None:
                piece.right.left = other
            piece.right, piece.size = other, size
            self._put(other)
        piece.free = False
        self._used[key] = piece
        self.allocated += piece.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: int) -> None:
        """Give a block back to the cache."""
        piece = self._used.pop(key, None)
        if piece is None:
            return
        self.allocated -= piece.size
        piece.free = True
        left, right = piece.left, piece.right
        if left is not None and left.free:
            self._take(left)
            piece = self._joined(left, piece)
        if right is not None and right.free:
            self._take(right)
            piece = self._joined(piece, right)
        self._put(piece)

    def _segment(self, size: int, small: bool) -> _Piece:
        if small:
            whole = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._top += 2**40  # segments are never neighbours
        return _Piece(whole, self._top, small)

    def _joined(self, left: _Piece, right: _Piece) -> _Piece:
        left.size += right.size
        left.right = right.right
        if right.right is not None:
            right.right.left = left
        left.free = True
        return left

    def _put(self, piece: _Piece) -> None:
        insort(self._idle[piece.small], (piece.size, piece.address, piece))

    def _take(self, piece: _Piece) -> None:
        idle = self._idle[piece.small]
        idle.pop(bisect_left(idle, (piece.size, piece.address)))


def replay(events: Iterable[int], sizes: list[int]) -> tuple[CachingAllocator, list[int]]:
    """The allocator after all events, and what it had reserved after each of them."""
    allocator = CachingAllocator()
    reserved = []
    for event in events:
        block = abs(event) - 1
        if event > 0:
            allocator.allocate(block, sizes[block])
        else:
            allocator.free(block)
        reserved.append(allocator.reserved)
    return allocator, reserved
