"""Bytes in units that people read."""

from __future__ import annotations

MIB, GIB = 2**20, 2**30


def format_bytes(nbytes: float) -> str:
    """In the unit that a person would use.

    >>> format_bytes(3 * 2**29), format_bytes(2**24)
    ('1.5 GiB', '16 MiB')
    """
    return f"{nbytes / GIB:.1f} GiB" if abs(nbytes) >= GIB else f"{nbytes / MIB:.0f} MiB"
