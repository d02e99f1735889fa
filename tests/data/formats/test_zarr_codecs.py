"""Chunks of Zarr arrays are read as zarr reads them, but no more than their arrays declare."""

import tracemalloc

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec
from zarr.codecs import numcodecs as zarr_numcodecs

from tests.data.helpers.formats import write_zarr
from unet3d.data.formats.volume_format import UnreadableFileError
from unet3d.data.formats.volumes import read_volume
from unet3d.data.formats.zarr_codecs import CODECS, STREAMS, decompress, limit_chunks
from unet3d.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")

AFFINE = np.diag([0.0005, 0.0005, 0.002, 1.0])
CHUNK_BYTES = 4 * 8 * 8 * 2

NUMCODECS = {
    "blosc": numcodecs.Blosc(),
    "bz2": numcodecs.BZ2(),
    "gzip": numcodecs.GZip(),
    "lz4": numcodecs.LZ4(),
    "zlib": numcodecs.Zlib(),
    "zstd": numcodecs.Zstd(),
}


def make_zarr3_codec(name):
    """Return a codec of Zarr 3 itself, or one that it takes from numcodecs."""
    codecs = {"blosc": BloscCodec, "gzip": GzipCodec, "zstd": ZstdCodec}
    others = {"bz2": zarr_numcodecs.BZ2, "lz4": zarr_numcodecs.LZ4, "zlib": zarr_numcodecs.Zlib}
    return (codecs | others)[name]()


def encode(name, content):
    return np.frombuffer(NUMCODECS[name].encode(np.frombuffer(content, np.uint8)), np.uint8)


def make_unsized_zstd(content):
    """Return a frame of Zstandard with one block, stored, that does not declare its size."""
    block = (len(content) << 3 | 1).to_bytes(3, "little")
    return np.frombuffer(bytes.fromhex("28b52ffd0058") + block + content, np.uint8)


@pytest.fixture
def voxels():
    return np.random.default_rng(0).integers(0, 99, (9, 8, 7)).astype(np.uint16)


@pytest.mark.parametrize("name", [None, *NUMCODECS])
def test_each_compressor_of_zarr_2_is_read(tmp_path, voxels, name):
    codec = name and NUMCODECS[name]
    image = write_zarr(tmp_path / "a.zarr", voxels, AFFINE, version=2, compressors=codec)
    np.testing.assert_array_equal(read_volume(image)[0][0], voxels)


@pytest.mark.parametrize("name", NUMCODECS)
@pytest.mark.parametrize("options", [{}, {"shards": (8, 8, 16)}], ids=["chunks", "shards"])
def test_each_codec_of_zarr_3_is_read(tmp_path, voxels, name, options):
    codec = make_zarr3_codec(name)
    for n, codecs in enumerate(([codec], [codec, Crc32cCodec()], [Crc32cCodec(), codec])):
        image = write_zarr(tmp_path / f"{n}.zarr", voxels, AFFINE, compressors=codecs, **options)
        np.testing.assert_array_equal(read_volume(image)[0][0], voxels)


@pytest.mark.parametrize("name", NUMCODECS)
@pytest.mark.parametrize("version", [2, 3])
def test_a_chunk_that_expands_to_more_than_its_array_declares_is_refused(
    tmp_path, voxels, version, name
):
    codec = NUMCODECS[name] if version == 2 else make_zarr3_codec(name)
    image = write_zarr(tmp_path / "a.zarr", voxels, AFFINE, version=version, compressors=codec)
    chunk = image / ("0/0.0.0" if version == 2 else "0/c/0/0/0")
    assert chunk.exists()
    chunk.write_bytes(encode(name, bytes(2**24)))
    with pytest.raises(UsageError, match="has a chunk that expands to more than its 512 bytes"):
        read_volume(image)


@pytest.mark.parametrize("name", NUMCODECS)
def test_a_chunk_is_not_decompressed_beyond_its_limit(name):
    bomb = encode(name, bytes(2**24))
    tracemalloc.start()
    with pytest.raises(UnreadableFileError, match="expands to more than"):
        decompress(name, bomb, 512)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_chunks_within_shards_have_their_own_limit(tmp_path, voxels):
    image = write_zarr(tmp_path / "a.zarr", voxels, AFFINE, shards=(8, 8, 16))
    (sharding,) = limit_chunks(zarr.open_group(image, mode="r")["0"]).metadata.codecs
    assert sharding.codecs[-1].limit == CHUNK_BYTES


@pytest.mark.parametrize("name", NUMCODECS)
@pytest.mark.parametrize("size", [1, 255, 256, 65_791, 65_792])
def test_content_has_the_size_that_it_declares(name, size):
    content = np.random.default_rng(0).bytes(size)
    assert decompress(name, encode(name, content), size).tobytes() == content
    with pytest.raises(Exception, match=r"ends too early|decompress"):
        decompress(name, encode(name, content)[:-1], size)


def test_content_of_zstandard_without_a_size_must_fill_the_chunk():
    assert decompress("zstd", make_unsized_zstd(b"abc"), 3).tobytes() == b"abc"
    for limit in (2, 4):
        with pytest.raises(RuntimeError, match="Zstd decompression error"):
            decompress("zstd", make_unsized_zstd(b"abc"), limit)
    with pytest.raises(UnreadableFileError, match="not a frame of Zstandard"):
        decompress("zstd", np.frombuffer(bytes.fromhex("502a4d18") + bytes(20), np.uint8), 512)


def test_other_codecs_and_filters_are_refused(tmp_path, voxels):
    assert {*NUMCODECS} == {*STREAMS, *CODECS}
    image = write_zarr(tmp_path / "a.zarr", voxels, AFFINE, version=2, compressors=numcodecs.LZMA())
    with pytest.raises(UsageError, match="has chunks compressed by lzma: it must be one of gzip"):
        read_volume(image)
    image = write_zarr(
        tmp_path / "b.zarr", voxels, AFFINE, version=2, filters=[numcodecs.Delta("<u2")]
    )
    with pytest.raises(UsageError, match="has the filters delta: save it without"):
        read_volume(image)
