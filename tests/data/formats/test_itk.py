import gzip
import re
import zlib

import nibabel
import numpy as np
import pytest
import SimpleITK

from tests.data.helpers.formats import turn, write_itk
from unet3d.data.formats.volumes import (
    iter_voxels,
    list_files,
    open_header,
    read_volume,
    write_labels,
)
from unet3d.data.preprocessing.cache import estimate_preprocessing_cost
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError

OBLIQUE = turn(0.7, 0.8, 2.5)


@pytest.fixture
def voxels():
    return np.random.default_rng(0).integers(0, 99, (9, 8, 7)).astype(np.int16)


@pytest.mark.parametrize("suffix", [".nrrd", ".mha", ".nii"])
def test_the_axes_are_those_of_nibabel(tmp_path, voxels, suffix):
    """ITK writes NIfTI too: nibabel reads the same voxels and axes from it."""
    file = write_itk(tmp_path / f"a{suffix}", voxels, OBLIQUE)
    write_itk(tmp_path / "b.nii", voxels, OBLIQUE)
    expected = nibabel.load(tmp_path / "b.nii")
    np.testing.assert_array_equal(read_volume(file)[0][0], np.asarray(expected.dataobj))
    np.testing.assert_allclose(read_volume(file)[1], expected.affine, atol=1e-5)


def test_the_axes_of_nrrd_are_read_as_written(tmp_path, voxels):
    text = (
        "NRRD0005\ntype: short\ndimension: 3\nspace: right-anterior-superior\nsizes: 9 8 7\n"
        "space directions: (0.7,0.1,0) (-0.1,0.8,0) (0,0,2.3)\nspace origin: (1.1,-2.2,3.3)\n"
        "endian: little\nencoding: raw\n\n"
    )
    (tmp_path / "a.nrrd").write_bytes(text.encode() + voxels.tobytes(order="F"))
    channels, affine = read_volume(tmp_path / "a.nrrd")
    np.testing.assert_array_equal(channels[0], voxels)
    expected = [[0.7, -0.1, 0, 1.1], [0.1, 0.8, 0, -2.2], [0, 0, 2.3, 3.3], [0, 0, 0, 1]]
    np.testing.assert_array_equal(affine, expected)


@pytest.mark.parametrize("suffix", [".nrrd", ".mha"])
def test_vectors_and_a_fourth_axis_are_channels(tmp_path, suffix):
    voxels = np.random.default_rng(0).random((3, 7, 8, 9)).astype(np.float32)  # (C, Z, Y, X)
    vectors = SimpleITK.GetImageFromArray(np.moveaxis(voxels, 0, -1), isVector=True)
    volumes = SimpleITK.GetImageFromArray(voxels, isVector=False)
    for image in (vectors, volumes):
        SimpleITK.WriteImage(image, str(tmp_path / f"a{suffix}"))
        header = open_header(tmp_path / f"a{suffix}")
        channels, _ = read_volume(tmp_path / f"a{suffix}")
        np.testing.assert_array_equal(channels, voxels.transpose(0, 3, 2, 1))
        assert header.shape == (9, 8, 7, 3)
        assert [c for c, _ in iter_voxels(tmp_path / f"a{suffix}", header)] == [0, 1, 2]


def test_complex_voxels_are_refused(tmp_path, voxels):
    image = SimpleITK.GetImageFromArray(voxels.astype(np.complex64))
    SimpleITK.WriteImage(image, str(tmp_path / "a.nrrd"))
    with pytest.raises(UsageError, match="not one real number each"):
        open_header(tmp_path / "a.nrrd")


@pytest.mark.parametrize("suffix", [".nrrd", ".mha"])
def test_a_compressed_file_that_ends_early_is_refused(tmp_path, voxels, suffix, capfd):
    file = tmp_path / f"a{suffix}"
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(voxels), str(file), True)
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(UsageError, match=r"cannot be read as a volume: it .*(ends after|damaged)"):
        read_volume(file)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("surplus", [2, 1008])
@pytest.mark.parametrize("kind", ["raw", "raw beside", "gzip", "gzip beside"])
def test_more_voxels_than_the_header_declares_are_refused(tmp_path, voxels, kind, surplus):
    file = write_itk(tmp_path / "a.nrrd", voxels, OBLIQUE)
    text = file.read_bytes()[: -voxels.nbytes].replace(
        b"encoding: raw", f"encoding: {kind[:4].strip()}".encode()
    )
    pack = gzip.compress if kind.startswith("gzip") else bytes
    data = tmp_path / "a.data" if kind.endswith("beside") else file
    if data != file:
        text = text.replace(b"encoding:", b"data file: a.data\nencoding:")
    for extra in (0, surplus):
        file.write_bytes(text)
        with data.open("ab" if data == file else "wb") as stream:
            stream.write(pack(voxels.tobytes(order="F") + bytes(extra)))
        if extra == 0:
            np.testing.assert_array_equal(read_volume(file)[0][0], voxels)
    with pytest.raises(
        UsageError, match=r"bytes after the voxels|not 1,008 bytes when decompressed"
    ):
        read_volume(file)


def test_bytes_that_a_header_says_to_skip_are_no_voxels(tmp_path, voxels):
    file = write_itk(tmp_path / "a.nrrd", voxels, OBLIQUE)
    text = file.read_bytes()[: -voxels.nbytes].replace(b"encoding:", b"byte skip: 6\nencoding:")
    file.write_bytes(text + b"before" + voxels.tobytes(order="F"))
    np.testing.assert_array_equal(read_volume(file)[0][0], voxels)


@pytest.mark.parametrize("switch", ["CompressedData = True", "CompressedData : 1"])
@pytest.mark.parametrize("damage", ["a flipped bit", "half of the stream", "other voxels"])
def test_compressed_voxels_that_are_damaged_are_refused(tmp_path, voxels, switch, damage):
    file = tmp_path / "a.mha"
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(voxels), str(file), True)
    head, voxels_line, stream = file.read_bytes().partition(b"ElementDataFile = LOCAL\n")
    size = len(stream)
    match damage:
        case "a flipped bit":
            stream = stream[: size // 2] + bytes([stream[size // 2] ^ 1]) + stream[size // 2 + 1 :]
        case "half of the stream":
            stream = stream[: size // 2]
        case "other voxels":
            stream = zlib.compress(bytes(voxels.nbytes + 1))
    head = head.replace(b"CompressedData = True", switch.encode())
    head = head.replace(f"Size = {size}".encode(), f"Size : {len(stream)}".encode())
    file.write_bytes(head + voxels_line + stream)
    with pytest.raises(UsageError, match=r"(damaged voxels|cannot be decoded)"):
        read_volume(file)


@pytest.mark.parametrize(
    ("separator", "end", "switch"),
    [(" = ", "\r\n", "True"), (": ", "\n", "1"), ("=", "\n", "true")],
)
def test_compressed_voxels_are_read_after_any_header(tmp_path, voxels, separator, end, switch):
    file = tmp_path / "a.mha"
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(voxels.T), str(file), True)
    head, voxels_line, stream = file.read_bytes().partition(b"ElementDataFile = LOCAL\n")
    text = (
        (head + voxels_line).decode().replace("CompressedData = True", f"CompressedData = {switch}")
    )
    text = text.replace(" = ", separator).replace("\n", end)
    file.write_bytes(text.encode() + stream)
    np.testing.assert_array_equal(read_volume(file)[0][0], voxels)


@pytest.mark.parametrize(
    ("suffix", "line", "other"),
    [(".nrrd", "encoding:", "Data File: a.raw\nencoding:"), (".mha", "= LOCAL", ": a.raw")],
)
def test_the_file_of_the_voxels_is_found_as_the_library_finds_it(
    tmp_path, voxels, suffix, line, other
):
    file = write_itk(tmp_path / f"a{suffix}", voxels, OBLIQUE)
    content = file.read_bytes()[: -voxels.nbytes]
    (tmp_path / "a.raw").write_bytes(voxels.tobytes(order="F"))
    file.write_bytes(content.replace(f"{line}".encode(), other.encode()))
    assert list_files(file) == [file, tmp_path / "a.raw"]
    np.testing.assert_array_equal(read_volume(file)[0][0], voxels)


def test_a_size_that_follows_a_colon_is_checked(tmp_path, voxels):
    file = tmp_path / "a.mha"
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(voxels), str(file), True)
    content = re.sub(rb"DataSize = \d+", b"DataSize: 100000000000", file.read_bytes())
    file.write_bytes(content)
    with pytest.raises(UsageError, match="of 100,000,000,000 bytes"):
        open_header(file)


@pytest.mark.parametrize(("encoding", "needed"), [("ascii", 1007), ("hex", 2016)])
def test_text_takes_at_least_two_bytes_for_each_voxel(tmp_path, voxels, encoding, needed):
    file = write_itk(tmp_path / "a.nrrd", voxels, OBLIQUE)
    content = file.read_bytes()[: -voxels.nbytes]
    file.write_bytes(
        content.replace(b"encoding: raw", f"encoding: {encoding}".encode()) + b"0 " * 99
    )
    with pytest.raises(UsageError, match=f"ends after 198 of {needed:,} bytes"):
        open_header(file)


def test_a_header_without_its_voxels_is_refused(tmp_path, voxels):
    file = write_itk(tmp_path / "a.mhd", voxels, OBLIQUE)
    assert list_files(file) == [file, tmp_path / "a.raw"]
    (tmp_path / "a.raw").unlink()
    with pytest.raises(UsageError, match=r"a\.mhd .*names a\.raw for its voxels, which is missing"):
        open_header(file)


@pytest.mark.parametrize("suffix", [".nrrd", ".mha"])
def test_a_name_that_is_not_text_is_refused_where_the_library_would_abort(tmp_path, voxels, suffix):
    file = write_itk(tmp_path / f"a{suffix}", voxels, OBLIQUE)
    odd = file.rename(tmp_path / f"a\udcff{suffix}")
    with pytest.raises(UsageError, match="is not named in UTF-8"):
        open_header(odd)
    like = write_itk(tmp_path / "b.nii", voxels, np.eye(4))
    with pytest.raises(UsageError, match="is not named in UTF-8"):
        write_labels(odd, voxels.astype(np.uint8), like, ["background", "a"])


def test_an_image_is_refused(tmp_path):
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(np.zeros((8, 8))), str(tmp_path / "a.mha"))
    with pytest.raises(UsageError, match=r"a\.mha must be a 3D volume, but has shape \[8, 8\]"):
        open_header(tmp_path / "a.mha")


@pytest.mark.parametrize("suffix", [".nrrd", ".mha"])
def test_an_absurd_size_is_refused_before_memory_is_allocated(tmp_path, voxels, suffix):
    file = tmp_path / f"a{suffix}"
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(voxels), str(file), True)
    content = file.read_bytes()
    for size in (b"7 8 9", b"9 8 7"):
        content = content.replace(size, b"20000 20000 20000")
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"it ends after [\d,]+ of [\d,]+ bytes of voxels"):
        read_volume(file)


def test_the_image_of_simpleitk_counts_as_memory(tmp_path):
    voxels = np.zeros((16, 60, 60, 60))
    file = tmp_path / "a.mha"
    image = SimpleITK.GetImageFromArray(np.moveaxis(voxels, 0, -1), isVector=True)
    SimpleITK.WriteImage(image, str(file), True)
    cost = estimate_preprocessing_cost([file], Preprocessing(num_classes=2))
    assert cost.ram >= 2 * voxels.nbytes


@pytest.mark.parametrize(
    ("suffix", "line", "other", "message"),
    [
        (".mha", "NDims = 3", "NDims = 1180591620717411303424", "NDims is 1180591620717411303424"),
        (".mha", "NDims = 3", "NDims : 99", "NDims is 99"),
        (".mha", "NDims = 3", "NDims = 3\nNDims = 99", "it has NDims twice"),
        (".mha", "NDims = 3", f"NDims = 3\nMy = {'x' * 5000}", "a line has more than 1,000"),
        (".mha", "NDims = 3", f"NDims = 3\nName = {'D' * 300}", "Name has more than 250 char"),
        (
            ".mha",
            "ObjectType = Image",
            f"ObjectType = {'I' * 40}",
            "ObjectType has more than 15 char",
        ),
        (".mha", "NDims = 3", "NDims = 3\njunk", "the line junk has no value"),
        (".mha", "NDims = 3", "NDims = 3\nNDims\0x = 99", "holds a control character"),
        (".mha", "CompressedData = False", "CompressedData = 1", "CompressedDataSize is missing"),
        (".mha", "Offset = ", "Offset = 1 2 3 4 5 6 7 8 9 ", "Offset is not 3 numbers"),
        (".mha", "TransformMatrix = ", "TransformMatrix = nan ", "is not 9 numbers"),
        (".mha", "NDims = 3", "NDims = 3\nHeaderSize = -5", "HeaderSize is -5"),
        (
            ".mha",
            "ElementType = MET_FLOAT",
            "ElementType = MET_STRING",
            "ElementType is MET_STRING",
        ),
        (".mha", "= LOCAL", "= %n%n%s 1 9 1", "its voxels are in several files"),
        (".mha", "= LOCAL", "= LIST\nx", "its voxels are in several files"),
        (".nrrd", "dimension: 3", "dimension: 99", "dimension and sizes are not"),
        (".nrrd", "encoding:", "byte skip: -9\nencoding:", "byteskip is -9"),
        (".nrrd", "encoding:", "BYTE SKIP: -9\nencoding:", "byteskip is -9"),
        (".nrrd", "encoding:", "byteskip: -500\nencoding:", "byteskip is -500"),
        (".nrrd", "encoding:", f"lineskip: {'9' * 11}\nencoding:", "lineskip is 99999999999"),
        (".nrrd", "encoding:", "Data File: a%09d.raw 1 4 1 2\nencoding:", "in several files"),
        (".nrrd", "dimension: 3", "# \x85dimension: 3\nDimension: 16", "dimension and sizes"),
        (".nrrd", "dimension: 3", "dimension: 3\n# \rDimension: 16", "a control character"),
        (".nrrd", "encoding: raw", "encoding: bzip2", "SimpleITK cannot read bzip2"),
        (".nrrd", "encoding:", "data file: %s 1 9 1\nencoding:", "voxels are in several files"),
    ],
)
def test_numbers_that_size_buffers_are_read_before_the_library_reads_them(
    tmp_path, voxels, suffix, line, other, message
):
    file = write_itk(tmp_path / f"a{suffix}", voxels.astype(np.float32), np.eye(4))
    content = file.read_bytes()
    assert line.encode() in content
    file.write_bytes(content.replace(line.encode(), other.encode("latin-1"), 1))
    with pytest.raises(UsageError, match=f"has an invalid header: .*{message}"):
        read_volume(file)
