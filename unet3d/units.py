"""Byte units, and the bytes that CUDA takes for itself."""

from __future__ import annotations

MIB, GIB = 2**20, 2**30

CUDA_CONTEXT_BYTES = 600 * MIB
"""GPU memory that torch's allocator does not see: CUDA's context and cuDNN's kernels."""


def format_bytes(nbytes: float) -> str:
    """Return bytes as text in GiB or MiB.

    >>> format_bytes(3 * 2**29), format_bytes(2**24)
    ('1.5 GiB', '16 MiB')
    """
    return f"{nbytes / GIB:.1f} GiB" if abs(nbytes) >= GIB else f"{nbytes / MIB:.0f} MiB"
