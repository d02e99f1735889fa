"""Build median networks: sorting networks without the comparators that a median does not need."""

from functools import cache

Comparator = tuple[int, int, int]
"""Two wires, and their outputs: 1 the minimum on the first, 2 the maximum on the second, 3 both."""

EIGHT: tuple[Comparator, ...] = (
    *((0, 1, 3), (2, 4, 3), (0, 2, 3), (1, 4, 3), (1, 2, 3)),  # sorts wires 0 1 2 4
    *((3, 5, 3), (6, 7, 3), (3, 6, 3), (5, 7, 3), (5, 6, 3)),  # sorts wires 3 5 6 7
    *((0, 3, 2), (2, 6, 1), (2, 3, 2)),
    *((4, 7, 1), (1, 5, 2), (4, 5, 1)),
)
"""For 8 values, 26 minima and maxima; the middle two values end on wires 3 and 4."""


def choose_median_network(wires: int, *, padded: bool) -> tuple[Comparator, ...]:
    """Return the network for windows of K = `wires` elements.

    It finds both middle values where a window can have an even number of elements: where K is even,
    and where some elements are padding.
    """
    if wires == 8 and not padded:
        return EIGHT
    return build_median_network(wires, pair=padded or wires % 2 == 0)


@cache
def build_median_network(wires: int, pair: bool) -> tuple[Comparator, ...]:
    """Build a network that puts rank (K - 1) // 2 of K = `wires` values on the wire of that number.

    With `pair` it also puts the next rank on the next wire.

    >>> build_median_network(3, pair=False)
    ((0, 1, 3), (0, 2, 2), (1, 2, 1))
    """
    middle = (wires - 1) // 2
    needed = {middle, middle + 1} if pair and wires > 1 else {middle}
    comparators: list[Comparator] = []
    for low, high in reversed(list(merge_sort(wires))):
        outputs = (low in needed) + 2 * (high in needed)
        if outputs:
            comparators.append((low, high, outputs))
            needed |= {low, high}
    return tuple(reversed(comparators))


def merge_sort(wires: int):
    """Yield the comparators of Batcher's odd-even merge sort, for any number of wires."""
    block = 1
    while block < wires:
        step = block
        while step >= 1:
            for start in range(step % block, wires - step, 2 * step):
                for low in range(start, min(start + step, wires - step)):
                    if low // (2 * block) == (low + step) // (2 * block):
                        yield low, low + step
            step //= 2
        block *= 2
