import json

import numpy as np
import pytest
import zarr

from tests.data.helpers.formats import write_zarr
from unet3d.data.formats import ome_zarr
from unet3d.data.formats.volumes import read_header, read_volume, write_labels
from unet3d.data.preprocessing.cache import digest_volume, get_version
from unet3d.errors import UsageError

AFFINE = np.diag([0.0005, 0.0005, 0.002, 1.0])


def edit(folder, change):
    """Change the first image of an OME-Zarr 0.5."""
    content = json.loads((folder / "zarr.json").read_text())
    change(content["attributes"]["ome"]["multiscales"][0])
    (folder / "zarr.json").write_text(json.dumps(content))


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read_and_labels_keep_version_numbers_and_units(
    tmp_path, voxels, version
):
    image = write_zarr(tmp_path / "a.zarr", voxels, AFFINE, version=version)
    np.testing.assert_array_equal(read_volume(image)[0][0], voxels)
    assert read_header(image).spacing_mm == pytest.approx((0.0005, 0.0005, 0.002))
    write_labels(tmp_path / "b.zarr", (voxels % 2).astype(np.uint8), image)
    file = ".zattrs" if version == 2 else "zarr.json"
    (written, first) = ((tmp_path / name / file).read_text() for name in ("b.zarr", "a.zarr"))
    for text in ('"micrometer"', "0.5", '"0.4"' if version == 2 else '"0.5"'):
        assert text in written
        assert text in first


def test_images_within_another_are_named_by_their_path(tmp_path, voxels):
    write_zarr(tmp_path / "a.zarr", voxels, AFFINE)
    labels = write_zarr(tmp_path / "a.zarr" / "labels" / "cells", voxels % 2, AFFINE)
    np.testing.assert_array_equal(read_volume(labels)[0][0], voxels % 2)
    write_labels(tmp_path / "b.zarr", voxels.astype(np.uint8), labels)
    assert '"micrometer"' in (tmp_path / "b.zarr" / "zarr.json").read_text()
    zarr.open_group(tmp_path / "c.zarr", mode="w")
    with pytest.raises(UsageError, match=r"name one, as in c\.zarr/0"):
        read_header(tmp_path / "c.zarr")


@pytest.mark.parametrize("version", [2, 3])
def test_large_labels_have_lower_resolutions_of_cubic_voxels(tmp_path, monkeypatch, version):
    monkeypatch.setattr(ome_zarr, "LOWEST", 32)
    voxels = np.random.default_rng(0).integers(0, 3, (75, 34, 12), np.uint8)
    image = write_zarr(tmp_path / "a.zarr", voxels, AFFINE, version=version)
    write_labels(tmp_path / "b.zarr", voxels, image)
    group = zarr.open_group(tmp_path / "b.zarr", mode="r")
    (content,) = (group.attrs.get("ome") or group.attrs)["multiscales"]
    found = [(d["path"], d["coordinateTransformations"][0]["scale"]) for d in content["datasets"]]
    assert found == [("0", [2.0, 0.5, 0.5]), ("1", [2.0, 1.0, 1.0]), ("2", [2.0, 2.0, 2.0])]
    for n in range(3):
        if version == 3:  # as OME-Zarr 0.5 demands
            assert group[str(n)].metadata.dimension_names == ("z", "y", "x")
        np.testing.assert_array_equal(group[str(n)][:].T, voxels[:: 2**n, :: 2**n])
    assert read_header(tmp_path / "b.zarr").shape == voxels.shape


def test_lower_resolutions_compare_axes_in_the_same_unit(tmp_path, monkeypatch):
    monkeypatch.setattr(ome_zarr, "LOWEST", 32)
    image = write_zarr(tmp_path / "a.zarr", np.zeros((60, 40, 12), np.uint8), AFFINE)

    def use_nanometers(image):
        for axis in image["axes"][1:]:
            axis["unit"] = "nanometer"
        image["datasets"][0]["coordinateTransformations"][0]["scale"] = [1.0, 400.0, 400.0]

    edit(image, use_nanometers)
    write_labels(tmp_path / "b.zarr", np.zeros((60, 40, 12), np.uint8), image)
    assert zarr.open_group(tmp_path / "b.zarr", mode="r")["1"].shape == (12, 20, 30)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("version", [2, 3])
def test_a_store_that_has_grown_since_its_metadata_was_consolidated_is_read_whole(
    tmp_path, voxels, version
):
    image = write_zarr(tmp_path / "a.zarr", voxels, AFFINE, version=version)
    zarr.consolidate_metadata(image)
    x, y, z = voxels.shape
    zarr.open_array(image / "0", mode="r+").resize((z + 2, y, x))
    assert read_header(image).shape == (x, y, z + 2)


def test_the_finest_level_is_the_image_whatever_the_order(tmp_path, voxels):
    image = write_zarr(tmp_path / "a.zarr", voxels, AFFINE)

    def list_a_coarse_level_first(content):
        scale = [{"type": "scale", "scale": [2.0, -1.0, 1.0]}]  # with an inverted axis
        content["datasets"].insert(0, {"path": "1", "coordinateTransformations": scale})

    edit(image, list_a_coarse_level_first)
    assert read_header(image).shape == voxels.shape


def test_labels_within_an_image_are_not_part_of_it(tmp_path, voxels):
    image = write_zarr(tmp_path / "a.zarr", voxels, AFFINE)
    before = get_version(image), digest_volume(image)
    labels = write_zarr(image / "labels" / "cells", voxels % 2, AFFINE)
    assert (get_version(image), digest_volume(image)) == before
    assert digest_volume(labels) != before[1]


def test_a_translation_is_the_origin(tmp_path, voxels):
    image = write_zarr(tmp_path / "a.zarr", voxels, AFFINE)

    def move(content):
        transforms = content["datasets"][0]["coordinateTransformations"]
        transforms.append({"type": "translation", "translation": [30.0, 20.0, 10.0]})

    edit(image, move)
    affine = read_header(image).affine
    np.testing.assert_allclose(affine[:3, 3], [0.01, 0.02, 0.03])
    write_labels(tmp_path / "b.zarr", voxels.astype(np.uint8), image)
    assert (read_header(tmp_path / "b.zarr").affine == affine).all()


def test_missing_units_and_scales_are_said(tmp_path, voxels):
    image = write_zarr(tmp_path / "a.zarr", voxels, AFFINE)
    edit(image, lambda content: [axis.pop("unit") for axis in content["axes"]])
    assert read_header(image).assumption == "no unit of its voxel spacing: mm is assumed"
    assert read_header(image).spacing_mm == pytest.approx((0.5, 0.5, 2))
    edit(image, lambda content: content["datasets"][0].pop("coordinateTransformations"))
    assert read_header(image).assumption == "no voxel spacing: 1 mm is assumed"
    assert read_header(image).spacing_mm == (1, 1, 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c: c["axes"][0].update(name="t"), r"has the axes .*\(t\) x .*: they must be z, y"),
        (lambda c: c["axes"][0].update(unit="parsec"), "has the unit parsec: it must be one such"),
        (lambda c: c.clear(), "it "),
    ],
)
def test_invalid_attributes_are_one_line(tmp_path, voxels, change, problem):
    image = write_zarr(tmp_path / "a.zarr", voxels, AFFINE)
    edit(image, change)
    with pytest.raises(UsageError, match=rf"a\.zarr cannot be read as a volume: .*{problem}"):
        read_header(image)
