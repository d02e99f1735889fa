"""Blocks are cut out of a volume where it is annotated, and stay at their place in space."""

import csv
from pathlib import Path

import nibabel
import numpy as np
import pytest
import tifffile

from unet3d.__main__ import main

AFFINE = np.array([[0, -2.0, 0, 5], [1.0, 0, 0, -3], [0, 0, 0.5, 7], [0, 0, 0, 1]])


@pytest.fixture
def volume(tmp_path, monkeypatch):
    """A volume of two channels, annotated in two of 27 blocks."""
    monkeypatch.chdir(tmp_path)
    image = np.random.default_rng(0).normal(size=(36, 30, 24, 2)).astype(np.float32)
    label = np.full(image.shape[:3], 255, np.uint8)
    label[2:4, 3:5, 4:6] = 1
    label[25:30, 21:29, 17:20] = 0
    nibabel.save(nibabel.Nifti1Image(image, AFFINE), "volume.nii")
    nibabel.save(nibabel.Nifti1Image(label, AFFINE), "label.nii")
    return image, label


def cut(*options):
    return main(["cut", "image=volume.nii", "label=label.nii", "output=cases", *options])


def test_annotated_blocks_are_cases_with_their_place_in_space(volume, capsys):
    assert cut("size=[12,10,8]", "gap=0", "ignore_label=255") == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    main(line.split()[2:])
    assert "2 cases" in capsys.readouterr().out
    with Path("cases/boxes.csv").open() as file:
        rows = {
            row.pop("case"): {k: int(v) for k, v in row.items()} for row in csv.DictReader(file)
        }
    assert set(rows) == {"volume_000", "volume_001"}
    for name, row in rows.items():
        box = tuple(slice(row[f"{axis}0"], row[f"{axis}1"]) for axis in "xyz")
        for folder, whole in zip(("images", "labels"), volume, strict=True):
            part = nibabel.load(f"cases/{folder}/{name}.nii.gz")
            np.testing.assert_array_equal(np.asarray(part.dataobj), whole[box])
            corner = AFFINE @ [row["x0"], row["y0"], row["z0"], 1]
            np.testing.assert_allclose(part.affine[:, 3], corner)
            np.testing.assert_allclose(part.affine[:3, :3], AFFINE[:3, :3])


def test_labels_that_may_be_transposed_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cube = np.ones((12, 12, 12), np.uint8)
    tifffile.imwrite("volume.tif", cube)
    np.save("label.npy", cube)
    assert cut("image=volume.tif", "label=label.npy", "size=[8,8,8]") == 0
    assert "label.npy is read as x, y, z, but arrays in TIFF" in capsys.readouterr().err


def test_an_ignored_label_of_0_is_refused(volume, capsys):
    assert cut("ignore_label=0") == 2
    assert "training reads 0 as background; write 255" in capsys.readouterr().err


def test_blocks_are_apart_and_as_many_as_wanted(volume):
    assert cut("size=[8,8,8]", "gap=4", "count=1", "ignore_label=255") == 0
    with Path("cases/boxes.csv").open() as file:
        [row] = csv.DictReader(file)
    assert [int(row[f"{axis}0"]) % 12 for axis in "xyz"] == [0, 0, 0]


def test_the_table_of_blocks_is_read_again_for_each_volume(volume):
    for name in ("volume.nii", "label.nii"):
        Path(name).rename(f"b, {name}")
    words = ["cut", "image='b, volume.nii'", "label='b, label.nii'", "ignore_label=255"]
    Path("first.csv").write_text("x0,x1,y0,y1,z0,z1\n8,24,3,19,2,18\n")
    assert main([*words, "output=cases", "boxes=first.csv"]) == 0
    table = Path("cases/boxes.csv")
    table.write_text(table.read_text() + "other_000,0,8,0,8,0,8\n")
    assert main([*words, "output=again", "boxes=cases/boxes.csv"]) == 0
    with Path("again/boxes.csv").open() as file:
        [row] = csv.DictReader(file)
    assert list(row.values()) == ["b, volume_000", "8", "24", "3", "19", "2", "18"]
    table.write_text("case,x0,x1,y0,y1,z0,z1\na,b,8,24,3,19,2,18\n")
    assert main([*words, "output=more", "boxes=cases/boxes.csv"]) == 2


def test_labels_without_a_spacing_have_that_of_their_image(volume):
    _, label = volume
    tifffile.imwrite("label.tif", label.T, metadata=None)
    assert cut("size=[12,10,8]", "gap=0", "ignore_label=255", "label=label.tif") == 0
    first = nibabel.load("cases/labels/volume_000.nii.gz")
    np.testing.assert_array_equal(
        first.affine, nibabel.load("cases/images/volume_000.nii.gz").affine
    )


def test_a_table_names_the_blocks(volume, tmp_path):
    (tmp_path / "mine.csv").write_text("z0, z1, x0, x1, y0, y1\n0, 8, 1, 30, 2, 9\n")
    assert cut("boxes=mine.csv") == 0
    assert nibabel.load("cases/labels/volume_000.nii.gz").shape == (29, 7, 8)


def test_boxes_that_overlap_cause_a_warning(volume, tmp_path, capsys):
    rows = ["0,9,0,9,0,9", "9,18,0,9,0,9", "17,20,8,12,8,9", "17,20,8,12,8,9"]
    for last, expected in ((3, 1), (2, 0)):
        (tmp_path / "mine.csv").write_text("\n".join(["x0,x1,y0,y1,z0,z1", *rows[:last], ""]))
        assert cut("boxes=mine.csv", f"output=cases{last}") == 0
        assert capsys.readouterr().err.count("boxes 2 and 3 of mine.csv overlap") == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["size=[12,10,8]", "gap=0"], "no block of label.nii"),
        (["boxes=mine.csv"], "[0, 9, 0, 9, 0, 25] is not within (36, 30, 24) voxels"),
        (["boxes=other.csv"], "No such file or directory: 'other.csv'"),
        (["boxes=semicolons.csv"], "must have columns x0,x1,y0,y1,z0,z1, divided by commas, with"),
        (["boxes=semicolons.csv"], "numbers: no column 'x0'"),
        (["boxes=none.csv"], "boxes=none.csv lists no box"),
        (["label=scaled.nii"], "scaled.nii cannot be read by parts"),
        (["label=shifted.nii"], "is not on the grid of volume.nii (36 x 30 x 24 voxels of "),
        (["label=small.nii.gz"], "small.nii.gz cannot be read by parts"),
    ],
)
def test_what_cannot_be_cut_is_one_line(volume, tmp_path, capsys, options, message):
    (tmp_path / "mine.csv").write_text("x0,x1,y0,y1,z0,z1\n0,9,0,9,0,25\n")
    (tmp_path / "none.csv").write_text("x0,x1,y0,y1,z0,z1\n")
    (tmp_path / "semicolons.csv").write_text("x0;x1;y0;y1;z0;z1\n0;9;0;9;0;9\n")
    label = np.zeros((36, 30, 24), np.uint8)
    scaled = nibabel.Nifti1Image(label, AFFINE)
    scaled.header.set_slope_inter(2, 0)
    nibabel.save(scaled, "scaled.nii")
    nibabel.save(nibabel.Nifti1Image(label, AFFINE), "small.nii.gz")
    nibabel.save(nibabel.Nifti1Image(label, AFFINE + np.eye(4, k=3)), "shifted.nii")
    if "gap=0" in options:
        nibabel.save(nibabel.Nifti1Image(label, AFFINE), "label.nii")
    assert cut(*options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_blocks_of_a_volume_are_not_mixed_with_earlier_ones(volume, capsys):
    Path("volume_b.nii").symlink_to("volume.nii")  # another volume, whose name begins as this one's
    for words in (["image=volume_b.nii"], []):
        assert cut(*words, "size=[12,10,8]", "ignore_label=255") == 0
    assert cut("size=[12,10,8]", "ignore_label=255") == 2
    assert "cases/images/volume_000.nii.gz exists" in capsys.readouterr().err


def test_values_that_need_64_bits_are_refused(volume, capsys):
    _, label = volume
    np.save("label.npy", label.astype(np.int64) + 2**33)
    np.save("image.npy", label.astype(np.float32))
    words = "image=image.npy", "label=label.npy", "output=cases", "size=[12,10,8]"
    assert main(["cut", *words]) == 2
    assert "need 64 bits" in capsys.readouterr().err
    np.save("label.npy", label)
    np.save("other.npy", label.astype(np.float16))  # a warning would be an error
    assert main(["cut", "image=other.npy", *words[1:], "output=halves"]) == 0
    np.save("other.npy", np.where(label, 1e300, np.inf))
    assert main(["cut", "image=other.npy", *words[1:]]) == 2
    assert "the values 1e+300 to 1e+300 need 64 bits" in capsys.readouterr().err
