import gzip

import nibabel
import numpy as np
import pytest
from nibabel.nifti1 import Nifti1Extension

from tests.data.helpers.corruptions import set_header_fields
from tests.data.helpers.datasets import make_image, save_volume
from unet3d.data.formats.volumes import open_header
from unet3d.data.nifti.reader import read_volume
from unet3d.errors import UsageError


def test_integers_stay_integers_unless_the_header_scales_them(tmp_path):
    voxels = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    image = nibabel.Nifti1Image(voxels, np.eye(4))
    nibabel.save(image, tmp_path / "plain.nii")
    image.header.set_slope_inter(0.5, -3)
    nibabel.save(image, tmp_path / "scaled.nii.gz")
    plain, scaled = (read_volume(tmp_path / name)[0] for name in ("plain.nii", "scaled.nii.gz"))
    stored, both = (open_header(tmp_path / name) for name in ("plain.nii", "scaled.nii.gz"))
    assert (stored.reading_bytes, both.reading_bytes) == (2 * 24, (2 + 4) * 24)
    assert plain.dtype == np.int16
    np.testing.assert_array_equal(plain[0], voxels)
    assert scaled.dtype == np.float32
    np.testing.assert_array_equal(scaled[0], voxels * 0.5 - 3)


@pytest.mark.parametrize("position", [0.3, 0.5, 0.9, -12, -6])
def test_a_flipped_bit_in_a_compressed_file_is_detected(tmp_path, position):
    file = save_volume(tmp_path / "a.nii.gz", make_image(0))
    content = bytearray(file.read_bytes())
    content[position if position < 0 else int(position * len(content))] ^= 1
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.nii\.gz cannot be read as a volume"):
        read_volume(file)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
def test_a_file_with_more_or_fewer_bytes_than_its_header_declares_is_refused(tmp_path, name):
    original = nibabel.Nifti1Image(make_image(0), np.eye(4)).to_bytes()
    for content, message in (
        (original + b"x", "contains data beyond"),
        (original[:-1], "ends after"),
    ):
        (tmp_path / name).write_bytes(gzip.compress(content) if name[-1] == "z" else content)
        with pytest.raises(UsageError, match=message):
            read_volume(tmp_path / name)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, ">i2"])
def test_scaled_values_match_nibabel(tmp_path, name, dtype):
    written = nibabel.Nifti1Image((make_image(0) * 3).astype(dtype), np.eye(4))
    written.header.set_slope_inter(0.37, -11.3)
    nibabel.save(written, tmp_path / name)
    channels, _ = read_volume(tmp_path / name)
    assert channels.dtype == np.float32
    expected = np.asarray(nibabel.load(tmp_path / name).dataobj, np.float32)
    assert np.array_equal(channels[0], expected)


def test_an_absurd_shape_is_refused_before_memory_is_allocated(tmp_path):
    file = save_volume(tmp_path / "a.nii.gz", make_image(0))
    set_header_fields(file, dim=[3, 32767, 32767, 32767, 1, 1, 1, 1])
    with pytest.raises(UsageError, match="is too short for 35,181"):
        read_volume(file)


@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize(
    ("size", "is_read"), [(32, True), (16, True), (48, False), (8, False), (-16, False)]
)
def test_an_extension_ends_before_the_voxels(tmp_path, byte_order, size, is_read):
    file, voxels = tmp_path / "a.nii.gz", np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    header = nibabel.Nifti1Header(endianness=byte_order)
    image = nibabel.Nifti1Image(voxels, np.eye(4), header)
    image.header.extensions.append(Nifti1Extension("comment", b"a" * 20))
    nibabel.save(image, file)
    content = gzip.decompress(file.read_bytes())
    lengths = b"".join(np.array(n, f"{byte_order}i4").tobytes() for n in (size, 32 - size))
    file.write_bytes(gzip.compress(content[:352] + lengths[:4] + content[356:]))
    if size == 16:  # a second one follows it
        content = content[:352] + lengths[:4] + content[356:368] + lengths[4:] + content[372:]
        file.write_bytes(gzip.compress(content))
    if is_read:
        np.testing.assert_array_equal(read_volume(file)[0][0], voxels)
        return
    with pytest.raises(UsageError, match=f"an extension of {size} bytes before its voxels"):
        read_volume(file)


@pytest.mark.parametrize(("count", "is_read"), [(100, True), (101, False)])
def test_a_header_has_a_hundred_extensions_at_most(tmp_path, count, is_read):
    file, voxels = tmp_path / "a.nii.gz", np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    image = nibabel.Nifti1Image(voxels, np.eye(4))
    image.header.extensions.extend([Nifti1Extension("comment", b"a")] * count)
    nibabel.save(image, file)
    if is_read:
        np.testing.assert_array_equal(read_volume(file)[0][0], voxels)
        return
    with pytest.raises(UsageError, match="an invalid header: more than 100 extensions"):
        read_volume(file)


def test_axes_of_size_1_after_the_third_do_not_count(tmp_path):
    image = nibabel.Nifti1Image(np.zeros((5, 6, 7, 1, 1), np.uint8), np.eye(4))
    nibabel.save(image, tmp_path / "a.nii")
    assert open_header(tmp_path / "a.nii").shape == (5, 6, 7)
    assert read_volume(tmp_path / "a.nii")[0].shape == (1, 5, 6, 7)


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_a_volume_without_axes_is_refused(tmp_path, kind):
    content = bytearray(kind(np.zeros((4, 4, 4), np.uint8), np.eye(4)).to_bytes())
    start, size = (40, 2) if kind is nibabel.Nifti1Image else (16, 8)
    content[start : start + size] = bytes(size)
    (tmp_path / "a.nii").write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.nii cannot be read as a volume"):
        open_header(tmp_path / "a.nii")
