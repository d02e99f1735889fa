"""Read the options of torch's caching allocator: the environment variable PYTORCH_ALLOC_CONF.

garbage_collection_threshold is ignored, as torch does unless a process may use only a fraction of
the memory. See torch's AllocatorConfig.cpp and CUDACachingAllocator.cpp, from 2.9 on.
"""

import logging
import os
import re
from dataclasses import dataclass
from functools import cache

from unet3d.text import MIB

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The second is the older name."""

ROUNDUP_INTERVALS = 16
"""From 1 MiB, which includes all smaller requests, to 32 GiB, which includes all larger ones."""
WITHOUT_EFFECT = re.compile(r"(garbage_collection_threshold|pinned_|graph_capture_|release_lock_)")
"""Options that change neither blocks nor segments of a GPU."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AllocatorSettings:
    """Options that change what the allocator reserves."""

    expandable_segments: bool = False
    max_split_size: int | None = None  # bytes; larger blocks are not split
    roundup_divisions: tuple[int, ...] = ()
    """Divisions between two powers of two that requests are rounded up to: of requests below 2 MiB,
    below 4 MiB, and so on. 0 or 1 rounds nothing."""

    def round_request(self, nbytes: int) -> int:
        """Return a request rounded up to a division between two powers of two.

        >>> AllocatorSettings(roundup_divisions=(4,)).round_request(5 * 2**18 + 1) / 2**18
        6.0
        """
        if not self.roundup_divisions:
            return nbytes
        interval = max(nbytes.bit_length() - MIB.bit_length(), 0)
        divisions = self.roundup_divisions[min(interval, len(self.roundup_divisions) - 1)]
        if divisions <= 1 or nbytes <= 512 * divisions:
            return nbytes
        step = 2 ** (nbytes.bit_length() - 1) // divisions
        return -(-nbytes // step) * step


def get_allocator_settings() -> AllocatorSettings:
    """Return the options of the environment."""
    for variable in VARIABLES:
        if text := os.environ.get(variable, ""):
            return parse_allocator_settings(text)
    return AllocatorSettings()


@cache
def parse_allocator_settings(text: str) -> AllocatorSettings:
    """Parse options as torch does, which refuses invalid ones: key:value pairs between commas.

    >>> parse_allocator_settings("expandable_segments:True,max_split_size_mb:128").max_split_size
    134217728
    """
    expandable, limit, divisions = False, None, ()
    for key, value in re.findall(r"([^,:\[\]]+):(\[[^\]]*\]|[^,]*)", text.replace(" ", "")):
        if key == "expandable_segments":
            expandable = value == "True"
        elif key == "max_split_size_mb":
            limit = int(value) * MIB
        elif key == "roundup_power2_divisions":
            divisions = _parse_divisions(value)
        elif not WITHOUT_EFFECT.match(key):
            log.warning("the estimate of memory does not follow %s:%s", key, value)
    return AllocatorSettings(expandable, limit, divisions)


def _parse_divisions(value: str) -> tuple[int, ...]:
    """Parse one number for all sizes, or a list of MiB and numbers such as [64:2,1024:4,>:1].

    >>> _parse_divisions("[2:4,8:2,>:1]")
    (4, 4, 0, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    """
    if not value.startswith("["):
        return (int(value),) * ROUNDUP_INTERVALS
    divisions, end = [0] * ROUNDUP_INTERVALS, 0
    for item in value.strip("[]").split(","):
        size, _, number = item.partition(":")
        if size == ">":
            start, stop = end, ROUNDUP_INTERVALS
        else:
            index = min(int(size).bit_length(), ROUNDUP_INTERVALS) - 1
            start, stop = (index if end else 0), index + 1
        divisions[start:stop] = [int(number)] * (stop - start)
        end = stop
    return tuple(divisions)
