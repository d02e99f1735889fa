import numpy as np
import pytest
import tifffile

from unet3d.data.formats.volume_format import NO_SPACING
from unet3d.data.formats.volumes import open_voxels, read_header, read_volume, write_labels
from unet3d.data.preprocessing.cache import digest_volume
from unet3d.errors import UsageError

UM = "\u00b5m"


@pytest.fixture
def stack():
    """Slices as they are on disk: (Z, Y, X)."""
    return np.random.default_rng(0).integers(0, 255, (5, 12, 9)).astype(np.uint8)


KINDS = [{"metadata": None}, {"bigtiff": True, "byteorder": ">"}, {"compression": "lzw"}]
KINDS += [{"compression": "zlib", "tile": (16, 16)}, {"ome": True}, {"imagej": True}]


@pytest.mark.parametrize("options", KINDS)
def test_a_stack_of_slices_is_x_y_z(tmp_path, stack, options):
    tifffile.imwrite(tmp_path / "a.tif", stack, photometric="minisblack", **options)
    np.testing.assert_array_equal(read_volume(tmp_path / "a.tif")[0], stack.T[None])
    header = read_header(tmp_path / "a.tif")
    assert header.spacing_mm == (1, 1, 1)
    assert header.assumption == NO_SPACING


@pytest.mark.parametrize(
    ("axes", "shape"), [("ZCYX", (5, 3, 12, 9)), ("CZYX", (3, 5, 12, 9)), ("ZYXS", (5, 12, 9, 3))]
)
def test_channels_and_colors_are_channels(tmp_path, axes, shape):
    voxels = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
    order = [axes.replace("S", "C").index(axis) for axis in "CXYZ"]
    options = {"photometric": "rgb" if "S" in axes else "minisblack", "ome": "S" not in axes}
    options["metadata"] = {"axes": axes}
    for compression in (None, "zlib"):
        tifffile.imwrite(tmp_path / "a.tif", voxels, **options, compression=compression)
        np.testing.assert_array_equal(read_volume(tmp_path / "a.tif")[0], voxels.transpose(order))


def test_the_spacing_of_ome_is_read_and_written_exactly(tmp_path, stack):
    metadata = {"axes": "ZYX"}
    for axis, size in zip("XYZ", (0.1234567890123, 0.3, 1.7), strict=True):
        metadata |= {f"PhysicalSize{axis}": size, f"PhysicalSize{axis}Unit": UM}
    image = tmp_path / "a.ome.tif"
    tifffile.imwrite(image, stack, metadata=metadata)
    expected = tuple(size * 1e-3 for size in (0.1234567890123, 0.3, 1.7))
    assert read_header(image).spacing_mm == pytest.approx(expected, rel=1e-15)
    write_labels(tmp_path / "b.ome.tif", stack.T, image)
    assert (read_header(tmp_path / "b.ome.tif").affine == read_header(image).affine).all()
    with tifffile.TiffFile(tmp_path / "b.ome.tif") as written:
        assert f'PhysicalSizeXUnit="{UM}"' in written.ome_metadata


def test_slices_without_a_distance_get_that_of_the_columns(tmp_path, stack):
    options = {"imagej": True, "resolution": (2, 2), "metadata": {"unit": "um"}}
    tifffile.imwrite(tmp_path / "a.tif", stack, **options)
    header = read_header(tmp_path / "a.tif")
    assert header.spacing_mm == pytest.approx((5e-4, 5e-4, 5e-4))
    assert "no spacing along z" in header.assumption
    write_labels(tmp_path / "b.tif", stack.T, tmp_path / "a.tif")
    assert (read_header(tmp_path / "b.tif").affine == header.affine).all()


def test_time_series_are_refused(tmp_path):
    voxels = np.zeros((3, 4, 8, 8), np.uint8)
    tifffile.imwrite(tmp_path / "a.ome.tif", voxels, metadata={"axes": "TZYX"})
    with pytest.raises(UsageError, match=r"a\.ome\.tif .* has the axes .*\(T\).*: save one stack"):
        read_header(tmp_path / "a.ome.tif")


def test_channels_and_slices_without_names_are_refused(tmp_path):
    voxels = np.zeros((2, 5, 8, 9), np.float32)
    tifffile.imwrite(tmp_path / "a.tif", voxels, photometric="minisblack")
    message = "has 4 axes without names, 2 x 5 x 8 x 9: write its axes, such as ZCYX"
    with pytest.raises(UsageError, match=message):
        read_header(tmp_path / "a.tif")


@pytest.mark.parametrize("options", [{"imagej": True}, {"compression": "lzw"}])
def test_a_file_that_lost_slices_is_refused_without_a_log(tmp_path, stack, options, capfd):
    tifffile.imwrite(tmp_path / "a.tif", stack, photometric="minisblack", **options)
    content = (tmp_path / "a.tif").read_bytes()
    (tmp_path / "a.tif").write_bytes(content[: int(0.6 * len(content))])
    with pytest.raises(UsageError, match=r"a\.tif cannot be read as a volume: it "):
        read_volume(tmp_path / "a.tif")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_planes_that_only_the_metadata_declares_are_missing(tmp_path, stack, compression):
    file, depth = tmp_path / "a.ome.tif", len(stack)
    tifffile.imwrite(file, stack, metadata={"axes": "ZYX"}, compression=compression)
    content = file.read_bytes()
    file.write_bytes(content.replace(f'SizeZ="{depth}"'.encode(), b'SizeZ="9"'))
    message = f"lacks {9 - depth} of the 9 planes that its metadata declares"
    for read in (read_header, read_volume):
        with pytest.raises(UsageError, match=message):
            read(file)


@pytest.mark.parametrize("name", ["a.tif", "a.ome.tif"])
def test_pages_written_one_by_one_are_one_volume(tmp_path, stack, name):
    with tifffile.TiffWriter(tmp_path / name) as writer:
        for page in stack:  # each becomes a series
            writer.write(page)
        writer.write(stack[0, ::3, ::3], subfiletype=1)  # a thumbnail
    np.testing.assert_array_equal(read_volume(tmp_path / name)[0], stack.T[None])
    assert read_header(tmp_path / name).shape == (9, 12, 5)


def test_parts_of_a_tiled_file_are_not_those_of_a_preview_before_it(tmp_path):
    voxels = np.random.default_rng(0).integers(0, 99, (8, 40, 48)).astype(np.uint16)
    options = {
        "tile": (16, 16),
        "compression": "zlib",
        "photometric": "minisblack",
        "metadata": {"axes": "ZYX"},
    }
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        writer.write(voxels[::2, ::2, ::2], subfiletype=1, **options)
        writer.write(voxels, **options)
    box = (slice(3, 9), slice(2, 8), slice(1, 4))
    opened = open_voxels(tmp_path / "a.tif")
    np.testing.assert_array_equal(opened.read(box), voxels.T[box][None])
    opened.array.store.close()


@pytest.mark.parametrize(
    ("depth", "listed"), [(5, "2 of 5 x 12 x 9"), (3, "1 of 5 x 12 x 9, 1 of 3 x 12 x 9")]
)
def test_several_stacks_in_one_file_are_refused_with_their_number_and_shapes(
    tmp_path, stack, depth, listed
):
    tifffile.imwrite(tmp_path / "a.tif", stack, photometric="minisblack")
    tifffile.imwrite(tmp_path / "a.tif", stack[:depth], photometric="minisblack", append=True)
    with pytest.raises(UsageError, match=f"it holds 2 series of images, {listed}: save those"):
        read_header(tmp_path / "a.tif")


@pytest.mark.parametrize("kind", ["named", "of another program", "composite"])
def test_channels_of_one_slice_are_no_slices(tmp_path, stack, kind):
    named, composite = {"Channel": {"Name": list("abcde")}}, {"mode": "composite"}
    metadata = {"axes": "CYX"} | {"named": named, "composite": composite}.get(kind, {})
    file = tmp_path / ("a.tif" if kind == "composite" else "a.ome.tif")
    tifffile.imwrite(file, stack, imagej=kind == "composite", metadata=metadata)
    if kind == "of another program":  # only tifffile calls slices channels
        file.write_bytes(file.read_bytes().replace(b'"tifffile', b'"Bioforma'))
    with pytest.raises(UsageError, match=r"5 channels \(C\) of one slice, and 2D images are not"):
        read_header(file)


def test_the_spacing_that_nnunet_keeps_beside_a_file_is_read(tmp_path, stack):
    (tmp_path / "a.json").write_text('{"spacing": [4.25, 0.75, 0.5]}')
    for name in ("a.tif", "a_0001.tif"):
        tifffile.imwrite(tmp_path / name, stack, metadata=None)
        assert read_header(tmp_path / name).spacing_mm == (0.5, 0.75, 4.25)
    options = {"imagej": True, "resolution": (2, 2), "metadata": {"unit": "mm", "axes": "ZYX"}}
    tifffile.imwrite(tmp_path / "a_0002.tif", stack, **options)  # says nothing of z
    assert read_header(tmp_path / "a_0002.tif").spacing_mm == (0.5, 0.75, 4.25)
    before = digest_volume(tmp_path / "a.tif")
    (tmp_path / "a.json").write_text("[]")
    assert digest_volume(tmp_path / "a.tif") != before
    assert read_header(tmp_path / "a.tif").assumption == "no voxel spacing: 1 mm is assumed"
