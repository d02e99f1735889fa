"""Build median networks: sorting networks without the comparators that a median does not need."""

from functools import cache

Comparator = tuple[int, int, int]
"""Two wires, and their outputs: 1 the minimum on the first, 2 the maximum on the second, 3 both."""


@cache
def build_median_network(wires: int, *, padded: bool) -> tuple[Comparator, ...]:
    """Build a network that puts rank (K - 1) // 2 of K = `wires` values on the wire of that number.

    It also puts the next rank on the next wire where a window can have an even number of elements:
    where K is even, and where some elements are padding.

    >>> build_median_network(3, padded=False)
    ((0, 1, 3), (0, 2, 2), (1, 2, 1))
    """
    middle = (wires - 1) // 2
    needed = {middle, middle + 1} if wires > 1 and (padded or wires % 2 == 0) else {middle}
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
