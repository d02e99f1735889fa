"""Decompress a chunk of a Zarr array to no more than the array declares.

zarr's own codecs allocate whatever a chunk expands to: 32 KiB can be 1 GiB.
"""

import bz2
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numcodecs
import numpy as np
import zarr
from numcodecs.abc import Codec
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import Crc32cCodec, ShardingCodec

from unet3d.data.formats.volume_format import UnreadableFileError

CHECKSUM_BYTES = 4

HEADER_BYTES = 18
"""The longest header of a frame of Zstandard."""

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

PREFIX = "numcodecs."
"""How Zarr 3 names codecs that Zarr 2 has, too."""


def limit_chunks(array: zarr.Array) -> zarr.Array:
    """Return the array with codecs that refuse a chunk with more voxels than it should have."""
    metadata: Any = array.metadata
    shape, itemsize = array.shards or array.chunks, array.dtype.itemsize
    if metadata.zarr_format == 3:
        metadata = replace(metadata, codecs=_limit_codecs(metadata.codecs, shape, itemsize))
    elif metadata.filters:
        names = ", ".join(item.codec_id for item in metadata.filters)
        raise UnreadableFileError(f"has the filters {names}: save it without")
    elif metadata.compressor is not None:
        codec = LimitedZarr2Codec(metadata.compressor.codec_id, prod(shape) * itemsize)
        metadata = replace(metadata, compressor=codec)
    return zarr.Array(zarr.AsyncArray(metadata, array.store_path))


def _limit_codecs(codecs: Sequence[Any], shape: Sequence[int], itemsize: int) -> Sequence[Any]:
    limited, limit = [], prod(shape) * itemsize
    for codec in codecs:
        if isinstance(codec, ShardingCodec):
            inner = _limit_codecs(codec.codecs, codec.chunk_shape, itemsize)
            limited.append(replace(codec, codecs=tuple(inner)))
        elif isinstance(codec, Crc32cCodec):
            limited.append(codec)
            limit += CHECKSUM_BYTES
        elif isinstance(codec, BytesBytesCodec):
            name = str(codec.to_dict()["name"])
            limited.append(LimitedCodec(name.removeprefix(PREFIX), limit))
        else:
            limited.append(codec)
    return limited


class LimitedZarr2Codec(Codec):
    """Decompress at most `limit` bytes of an array of Zarr 2."""

    codec_id = "unet3d.limited"

    def __init__(self, name: str, limit: int):
        self.name, self.limit = name, limit

    def encode(self, buf: Any) -> Any:
        raise NotImplementedError

    def decode(self, buf: Any, out: Any = None) -> memoryview:
        return decompress(self.name, np.frombuffer(buf, np.uint8), self.limit)


@dataclass(frozen=True)
class LimitedCodec(BytesBytesCodec):
    """Decompress at most `limit` bytes of an array of Zarr 3."""

    name: str
    limit: int
    is_fixed_size = False  # ty: ignore[incompatible-attribute-override]

    async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        content = decompress(self.name, chunk_data.as_numpy_array(), self.limit)
        return chunk_spec.prototype.buffer.from_bytes(content)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        raise NotImplementedError


def decompress(name: str, data: np.ndarray, limit: int) -> memoryview:
    """Return the content of a chunk; refuse more than `limit` bytes without allocating them.

    >>> decompress("zlib", np.frombuffer(zlib.compress(b"abc"), np.uint8), 3).tobytes()
    b'abc'
    """
    if name in STREAMS:
        stream = STREAMS[name]()
        content = stream.decompress(data.tobytes(), limit + 1)
        _check_size(len(content), limit)
        if not stream.eof:
            raise UnreadableFileError("has a chunk that ends too early")
        return memoryview(content)
    if name not in CODECS:
        known = ", ".join((*STREAMS, *CODECS))
        raise UnreadableFileError(f"has chunks compressed by {name}: it must be one of {known}")
    decode, read_size = CODECS[name]
    size = read_size(data)
    _check_size(0 if size is None else size, limit)
    # A codec fails if the content is not of this size.
    return memoryview(decode(data, np.empty(limit if size is None else size, np.uint8)))


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise UnreadableFileError(f"has a chunk that expands to more than its {limit:,} bytes")


def read_zstd_size(data: np.ndarray) -> int | None:
    """Return the size that a frame of Zstandard declares; None if it does not."""
    head = data[:HEADER_BYTES].tobytes()
    if not head.startswith(ZSTD_MAGIC):
        raise UnreadableFileError("has a chunk that is not a frame of Zstandard")
    flags = head[4]
    is_single, kind = bool(flags & 32), flags >> 6
    start = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    count = (int(is_single), 2, 4, 8)[kind]
    if not count:
        return None
    return int.from_bytes(head[start : start + count], "little") + 256 * (kind == 1)


def read_lz4_size(data: np.ndarray) -> int:
    """Return the size that numcodecs writes before a block of LZ4."""
    return _read_int(data, 0)


def read_blosc_size(data: np.ndarray) -> int:
    """Return the size that a buffer of Blosc declares; refuse one that would be read beyond."""
    if _read_int(data, 12) != len(data):
        raise UnreadableFileError("has a chunk that ends too early")
    return _read_int(data, 4)


def _read_int(data: np.ndarray, start: int) -> int:
    return int.from_bytes(data[start : start + 4].tobytes(), "little")


STREAMS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "zlib": zlib.decompressobj,
    "bz2": bz2.BZ2Decompressor,
}
"""Formats that declare no size, and are decompressed up to a limit."""

CODECS: dict[str, tuple[Callable[..., Any], Callable[[np.ndarray], int | None]]] = {
    "blosc": (numcodecs.Blosc().decode, read_blosc_size),
    "lz4": (numcodecs.LZ4().decode, read_lz4_size),
    "zstd": (numcodecs.Zstd().decode, read_zstd_size),
}
"""Formats that declare their size at the start."""
