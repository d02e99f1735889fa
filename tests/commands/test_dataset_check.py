"""What training does about cases that it cannot use."""

import nibabel
import numpy as np
import tifffile

from tests.data.helpers.datasets import make_image, make_label
from unet3d.__main__ import main
from unet3d.commands.train import build_training
from unet3d.training.run import summarize_run


def test_a_patch_that_is_mostly_padding_is_a_warning(composed, tmp_path):
    run = build_training(composed("data.patch_size=[32,32,32]"), tmp_path)
    expected = "data.patch_size=[32, 32, 32] has 8 times the voxels of the largest case (16x16x16)"
    assert any(note.startswith(expected) for note in run.notes)
    assert not any("padding" in note for note in build_training(composed(), tmp_path).notes)


def test_a_patch_that_is_thin_along_another_axis_than_the_volumes_is_a_warning(
    composed, tmp_path, capsys
):
    words = ("data.layout.size=[16,16,8]", "data.patch_size=[8,16,16]")
    swapped = (
        "data.patch_size=[8, 16, 16] is thin along x, volumes of 16 x 16 x 8 along z (up-down)"
    )
    run = build_training(composed(*words), tmp_path)
    assert swapped in run.notes
    assert "patches of 8 (left-right) x 16 (front-back) x 16 (up-down) voxels" in summarize_run(run)
    run = build_training(composed(words[0], "data.patch_size=[16,16,8]"), tmp_path)
    assert not any("is thin along" in note for note in run.notes)


def test_flips_that_mix_up_sides_are_a_warning(composed, tmp_path):
    regions = "data.regions={kidney_right:[1,2],kidney_left:[2]}"
    message = "training has flips along x (left-right), which make kidney_right look like "
    message += "kidney_left: set augmentation.flip_axes=[1,2]"
    assert build_training(composed(regions), tmp_path).data.data_warnings == [message]
    for without in ("augmentation.flip_axes=[1,2]", "augmentation=none"):
        assert build_training(composed(regions, without), tmp_path).data.data_warnings == []


def test_a_check_names_such_a_patch_for_files_of_any_orientation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    affine = np.array([[0, 0, 1.0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]])  # SAR
    for part, volume in {"images": make_image(0), "labels": make_label(0)}.items():
        file = nibabel.Nifti1Image(np.concatenate([volume] * 3, 1)[:8], affine)
        (tmp_path / part).mkdir()
        nibabel.save(file, tmp_path / part / "a.nii")
    words = ["check", "data=pairs", "data.root=.", "data.num_classes=3", "fold=none"]
    words += ["data.images=images/*.nii", "data.labels=labels/*.nii"]
    sides = "data.label_values={bg:0,left:1,right:2}"
    for word, count in (("augmentation=light", 1), ("augmentation=none", 0)):
        main([*words, sides, word])
        assert capsys.readouterr().out.count("make left look like right") == count
    main([*words, "data.patch_size=[8,16,16]"])
    assert "is thin along x, volumes of 16 x 48 x 8 along z (up-down)" in capsys.readouterr().out
    main([*words, "data.patch_size=[16,16,8]"])
    assert "is thin along" not in capsys.readouterr().out


def test_labels_that_may_be_transposed_are_a_hint(composed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cube = np.random.default_rng(0).integers(0, 2, (8, 8, 8), dtype=np.uint8)
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
    for n in range(2):
        cube = np.roll(cube, 1)
        tifffile.imwrite(f"images/{n}.tif", cube)
        np.save(f"labels/{n}.npy", cube)
    words = "data=pairs", "data.root=.", "data.images=images/*.tif", "data.num_classes=2"
    assert main(["check", *words, "data.labels=labels/*.npy"]) == 0
    assert "0.npy is read as x, y, z, but arrays in TIFF" in capsys.readouterr().out
    training = composed(
        *words, "data.labels=labels/*.npy", "data.patch_size=[8,8,8]", "fold=none", base=[]
    )
    [hint] = build_training(training, tmp_path).data.hints
    assert hint.message.startswith("0.npy is read as x, y, z")


def test_patches_of_files_without_an_orientation_have_no_left(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for part, volume in {"images": make_image(0), "labels": make_label(0)}.items():
        (tmp_path / part).mkdir()
        tifffile.imwrite(tmp_path / part / "a.tif", volume, metadata={"axes": "ZYX"})
    words = ["data=pairs", "data.root=.", "data.num_classes=3", "data.patch_size=[8,16,24]"]
    main(["check", *words, "data.images=images/*.tif", "data.labels=labels/*.tif", "fold=none"])
    assert "patches of 8 x 16 x 24 voxels along x, y and z" in capsys.readouterr().out


def test_many_label_values_may_be_objects_which_check_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for part in ("images", "labels"):
        (tmp_path / part).mkdir()
    tifffile.imwrite("images/a.tif", make_image(0))
    words = ["check", "data=pairs", "data.root=.", "data.label_values=auto", "fold=none"]
    words += ["data.images=images/*.tif", "data.labels=labels/*.tif"]
    for objects, hint in ((25, True), (5, False)):
        numbers = np.arange(16**3).reshape(16, 16, 16) % (objects + 1)
        tifffile.imwrite("labels/a.tif", numbers.astype(np.uint8))
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert (f"hint: each of {objects} label values is a class" in shown) == hint
