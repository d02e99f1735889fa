"""`unet3d predict` on small scans, with networks that were never trained."""

import json
import os
import shutil
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest

import unet3d
from tests.commands.helpers.checkpoints import checkpoints
from tests.data.helpers.datasets import write_nnunet
from unet3d.__main__ import main
from unet3d.config.names import announce
from unet3d.data.formats import volumes
from unet3d.data.formats.volumes import read_volume

pytestmark = pytest.mark.slow

TINY = ["model.width=2", "model.depth=2"]


@pytest.fixture
def images(tmp_path):
    """Return a function that writes scans."""

    def write_images(*names: str, affine=None, size=(18, 20, 14)):
        folder = tmp_path / "in"
        folder.mkdir(exist_ok=True)
        for number, name in enumerate(names):
            voxels = np.random.default_rng(number).normal(0, 1, size).astype(np.float32)
            image = nibabel.Nifti1Image(voxels, np.eye(4) if affine is None else affine)
            nibabel.save(image, folder / name)
        return folder

    return write_images


@pytest.fixture
def predict(tmp_path, monkeypatch):
    """Run `unet3d predict` in an empty working folder, on the CPU."""
    monkeypatch.chdir(tmp_path)

    def command(**words: object) -> int:
        words = {"output": tmp_path / "out", "device": "cpu"} | words
        return main(["predict", *(f"{key}={value}" for key, value in words.items())])

    return command


def read_labels(path):
    return np.asarray(nibabel.load(path).dataobj)


def list_labels(folder):
    """Return the names of the files that users see."""
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")


def test_labels_have_the_names_of_their_images(predict, checkpoint, images, tmp_path, capsys):
    words = {"checkpoint": checkpoint("one"), "input": images("a_0000.nii.gz", "b.nii")}
    assert predict(**words) == 0
    assert list_labels(tmp_path / "out") == ["a.nii.gz", "b.nii"]
    assert "a 18x20x14, 4 classes: " in capsys.readouterr().out
    assert predict(**words, output="other", output_format="nrrd") == 0
    assert list_labels(tmp_path / "other") == ["a.nrrd", "b.nrrd"]
    np.testing.assert_array_equal(
        read_volume(tmp_path / "other" / "b.nrrd")[0][0], read_labels(tmp_path / "out" / "b.nii")
    )


def test_voxels_outside_of_the_crop_are_background(predict, checkpoint, images, tmp_path):
    folder = images("a.nii")
    voxels = np.zeros((40, 41, 42), np.float32)
    voxels[10:28, 3:23, 20:34] = read_labels(folder / "a.nii")
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / "wide.nii")
    assert predict(checkpoint=checkpoint("one"), input=folder) == 0
    wide = read_labels(tmp_path / "out" / "wide.nii")
    np.testing.assert_array_equal(wide[10:28, 3:23, 20:34], read_labels(tmp_path / "out" / "a.nii"))
    assert wide.sum() == wide[10:28, 3:23, 20:34].sum()


def test_labels_of_another_checkpoint_scan_or_option_are_made_again_and_a_line_says_so(
    predict, checkpoint, images, tmp_path, capsys
):
    folder, words = images("a.nii", "b.nii"), {"checkpoint": checkpoint("other", "seed=1")}
    words["input"] = folder
    assert predict(**words | {"checkpoint": checkpoint("one")}) == 0
    first = read_labels(tmp_path / "out" / "a.nii")
    assert predict(**words) == 0
    assert "predicting 2 labels again" in capsys.readouterr().out
    assert not np.array_equal(read_labels(tmp_path / "out" / "a.nii"), first)
    times = (folder / "b.nii").stat()
    shutil.copy(folder / "a.nii", folder / "b.nii")
    os.utime(folder / "b.nii", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert predict(**words) == 0
    shown = capsys.readouterr().out
    assert "predicting 1 label again" in shown
    assert "1 already segmented, skipped" in shown
    a, b = (read_labels(tmp_path / "out" / name) for name in ("a.nii", "b.nii"))
    np.testing.assert_array_equal(a, b)
    words["overlap"] = 0.25
    assert predict(**words) == 0
    assert "predicting 2 labels again" in capsys.readouterr().out
    assert predict(**words, batch_size=2, memory_gib=1, prefetch=False) == 0  # equal labels
    assert "2 already segmented, skipped" in capsys.readouterr().out


def test_labels_of_a_scan_of_the_same_name_elsewhere_are_refused_and_stay(
    predict, checkpoint, images, tmp_path, capsys
):
    """Where every patient has a folder, a loop over them would keep the last one's labels."""
    first, words = images("scan.nii"), {"checkpoint": checkpoint("one")}
    second = tmp_path / "second"
    shutil.copytree(first, second)
    assert predict(**words, input=first) == 0
    assert predict(**words, input=second) == 0  # a copy
    image = nibabel.nifti1.load(second / "scan.nii")
    changed = nibabel.nifti1.Nifti1Image(image.get_fdata() + 1, image.affine)
    nibabel.nifti1.save(changed, second / "scan.nii")
    assert predict(**words, input=second) == 2
    assert "has labels of other scans with the same names: scan.nii" in capsys.readouterr().err
    assert predict(**words, input=second, overwrite=True) == 0
    assert predict(**words, input=first) == 2


def test_labels_that_predict_did_not_write_are_refused_and_stay(
    predict, checkpoint, images, tmp_path, capsys
):
    words = {"checkpoint": checkpoint("one"), "input": images("a.nii", "b.nii")}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b.nii").write_bytes(b"mine")
    assert predict(**words) == 2
    message = "has labels that predict did not write, or that were changed since: b.nii: move them"
    assert message in capsys.readouterr().err
    assert (tmp_path / "out" / "b.nii").read_bytes() == b"mine"
    assert predict(**words, overwrite=True) == 0
    (tmp_path / "out" / "a.nii").write_bytes(b"corrected")
    capsys.readouterr()
    assert predict(**words) == 0
    assert "a.nii was changed since, or lost a part, and is kept" in capsys.readouterr().out
    assert predict(**words | {"checkpoint": checkpoint("other", "seed=1")}) == 2
    assert (tmp_path / "out" / "a.nii").read_bytes() == b"corrected"


def test_a_missing_channel_is_named_and_the_others_are_segmented(
    predict, small, images, tmp_path, capsys
):
    root = write_nnunet(tmp_path / "nnunet", 5)
    words = ["data=nnunet", f"data.root={root}", *TINY]
    words += [word for word in small[1:] if "layout" not in word]
    two_channels = checkpoints(tmp_path / "runs", words)("two")
    folder = images("a_0000.nii", "a_0001.nii", "b_0000.nii", "c.nii")
    assert predict(checkpoint=two_channels, input=folder) == 1
    assert list_labels(tmp_path / "out") == ["a.nii"]
    captured = capsys.readouterr().err
    assert "b_0001.nii is missing" in captured
    assert "c.nii has 1 channels, but the network takes 2: T1, T2" in captured


def test_regions_become_labels_in_training_and_inference(
    predict, checkpoint, images, tmp_path, capsys
):
    regions = ["data.regions={whole:[1,2,3],core:[2,3],inner:[3]}", "data.region_labels=[2,3,3]"]
    words = {"checkpoint": checkpoint("regions", *regions), "input": images("a.nii")}
    assert predict(**words, save_probabilities=True) == 0
    assert "; regions whole [1, 2, 3], core [2, 3], inner [3]\n" in capsys.readouterr().out
    found = read_labels(tmp_path / "out" / "probabilities" / "a.nii")
    expected = np.zeros(found.shape[:-1])
    for region, label in enumerate([2, 3, 3]):
        expected[found[..., region] > 0.5] = label
    np.testing.assert_array_equal(read_labels(tmp_path / "out" / "a.nii"), expected)
    assert len(np.unique(expected)) >= 2


def test_only_axes_that_training_flipped_are_mirrored(
    predict, checkpoint, images, tmp_path, capsys
):
    flipped = checkpoint("flipped", "augmentation.flip_axes=[1]", "evaluation.tta=true")
    never = checkpoint("never", "augmentation.flip_p=0")
    words = {"checkpoint": flipped, "input": images("a.nii"), "overwrite": True}
    labels = {}
    for tta in ("true", "auto", "false"):  # auto: as its training was evaluated
        assert predict(**words, tta=tta) == 0
        is_said = f"tta={tta}: mirroring the axes that training flipped: [1]\n"
        assert (is_said in capsys.readouterr().out) == (tta != "false")
        labels[tta] = read_labels(tmp_path / "out" / "a.nii").tobytes()
    assert labels["true"] == labels["auto"] != labels["false"]

    def segment(**options):
        output = unet3d.load(flipped, device="cpu", **options).predict_file(
            images("a.nii") / "a.nii", tmp_path / "python.nii"
        )
        return read_labels(output).tobytes()

    assert segment() == labels["auto"]  # from Python as on the command line
    assert segment(tta=False) == segment(flip_axes=()) == labels["false"]
    announce.cache_clear()
    assert segment(tta=True) == segment(flip_axes=None) == labels["true"]
    assert "flip_axes= is now called tta=\n" in capsys.readouterr().err
    assert predict(**words | {"checkpoint": f"{never},{flipped}"}, tta="true") == 0
    assert "nothing to mirror, because there is no axis that the tr" in capsys.readouterr().out
    assert predict(**words, tta="[0,1]") == 2
    assert "tta=[0, 1]: training flipped only the axes [1], and a" in capsys.readouterr().err


def test_processes_share_the_scans_and_give_the_files_of_one(
    predict, checkpoint, images, tmp_path, capfd
):
    folder = images("a.nii", "b.nii", "c.nii", "d.nii", "e.nii")
    (folder / "c.nii").write_bytes(b"no scan")
    words = {"checkpoint": checkpoint("one"), "input": folder}
    assert predict(**words) == 1
    alone = {p.name: p.read_bytes() for p in (tmp_path / "out").glob("[!.]*")}
    capfd.readouterr()
    assert predict(**words, output=tmp_path / "shared", devices=2) == 1
    assert {p.name: p.read_bytes() for p in (tmp_path / "shared").glob("[!.]*")} == alone
    captured = capfd.readouterr()
    assert captured.out.count("UNet3D, ") == 1
    assert "4 of 5 scans segmented" in captured.out
    assert "1 failed:\n  c: " in captured.err


def test_processes_share_a_scan_that_is_segmented_by_parts(predict, checkpoint, tmp_path, capfd):
    np.save(tmp_path / "a.npy", np.random.default_rng(0).normal(size=(48, 40, 32)))
    words = {
        "checkpoint": checkpoint("one"),
        "input": tmp_path / "a.npy",
        "save_probabilities": True,
    }
    words |= {"region": [0, 48, 2, 40, 0, 32], "keep_largest_component": "none"}
    assert predict(**words) == 0
    capfd.readouterr()
    assert predict(**words, output=tmp_path / "shared", devices=2) == 0
    captured = capfd.readouterr()
    assert " in 2 slabs; labels: " in captured.out
    assert captured.out.count(", shared by 2 processes\n") == 1
    assert "\n1 of 1 scans segmented" in captured.out
    alone, shared = (sorted((tmp_path / name).rglob("*.npy")) for name in ("out", "shared"))
    assert [path.name for path in shared] == ["a.npy", "a.npy"]
    for path, expected in zip(shared, alone, strict=True):
        np.testing.assert_array_equal(np.load(path), np.load(expected))
    assert predict(**words, output=tmp_path / "shared") == 0
    assert "1 already segmented, skipped" in capfd.readouterr().out
    words["region"] = [0, 8, 2, 10, 0, 8]
    assert predict(**words, output=tmp_path / "shared") == 0
    assert "their voxels outside of region= become 0" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"checkpoint": "in"}, "found neither best.ckpt nor last.ckpt"),
        ({"checkpoint": "one,three"}, "cannot form an ensemble: classes is ["),
        ({"output": "in"}, "must not be the folder of the images"),
        ({"output": "out.nii"}, "is one file, but there are 2 scans"),
        ({"output": "b.nii", "output_format": "tif"}, "output=b.nii names a format"),
    ],
    ids=str,
)
def test_a_usage_error_is_one_line_with_exit_code_2(
    predict, checkpoint, images, tmp_path, capsys, words, message
):
    images("a.nii", "b.nii")
    options = {"one": [], "three": ["data.num_classes=5"]}
    names = words.get("checkpoint", "one").split(",")
    asked = ",".join(str(checkpoint(n, *options[n])) if n in options else n for n in names)
    capsys.readouterr()
    assert predict(**{"input": "in"} | words | {"checkpoint": asked}) == 2
    assert message in capsys.readouterr().err


def test_a_scan_may_have_its_labels_beside_it(predict, checkpoint, images):
    folder = images("a.nii")
    words = {"checkpoint": checkpoint("one"), "input": folder / "a.nii"}
    assert predict(**words, output=folder / "a_labels.nii") == 0
    assert (folder / "a_labels.nii").exists()


def test_two_labels_of_a_scan_have_probabilities_of_their_own(
    predict, checkpoint, images, tmp_path
):
    words = {"checkpoint": checkpoint("one"), "input": images("a.nii") / "a.nii"}
    for name in ("first", "second"):
        output = tmp_path / "out" / f"{name}.nii"
        assert predict(**words, save_probabilities=True, output=output) == 0
    names = list_labels(tmp_path / "out" / "probabilities")
    assert names == ["first.nii", "second.nii"]


def test_probabilities_are_those_of_the_labels_or_none(
    predict, checkpoint, images, tmp_path, capsys
):
    words = {"checkpoint": checkpoint("one"), "input": images("a.nii") / "a.nii"}
    other = words | {"checkpoint": checkpoint("other", "seed=1")}
    file = tmp_path / "out" / "probabilities" / "a.nii"
    assert predict(**words, output="out/a.nii", save_probabilities=True) == 0
    assert predict(**words, output="out/a.npy") == 0
    first = file.read_bytes()
    assert predict(**words, output="out/a.npy", save_probabilities=True) == 2
    assert "probabilities has files that are not those of a.npy: move" in capsys.readouterr().err
    assert file.read_bytes() == first
    assert predict(**words, output="out/a.nii") == 0
    assert file.read_bytes() == first
    capsys.readouterr()
    assert predict(**other, output="out/a.nii") == 0
    assert (
        "again that other checkpoints, options or scans made\nremoving the probabilities that"
        in (capsys.readouterr().out)
    )
    assert not file.exists()
    file.write_bytes(b"mine")
    assert predict(**other, output="out/a.nii", save_probabilities=True) == 2
    assert file.read_bytes() == b"mine"
    assert predict(**other, output="out/a.nii", save_probabilities=True, overwrite=True) == 0
    assert len(file.read_bytes()) == len(first)
    overwritten = {"output": "out/a.npy", "save_probabilities": True, "overwrite": True}
    assert predict(**words, **overwritten) == 0
    assert predict(**other, output="out/a.nii", save_probabilities=True) == 2
    assert predict(**words, output="out/a.nii") == 0
    assert file.read_bytes() == first
    record = tmp_path / "out" / ".unet3d" / "a.nii.json"
    for name in ("", ".", "..", "../in", str(tmp_path / "in"), "probabilities/../../in"):
        record.write_text(json.dumps(json.loads(record.read_text()) | {"probabilities": name}))
        assert predict(**words, output="out/a.nii", overwrite=True) == 0
    assert (tmp_path / "in" / "a.nii").exists()


def test_another_array_of_a_file_is_segmented_and_scored(predict, checkpoint, tmp_path, capsys):
    rng, labels = np.random.default_rng(0), []
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("first", "second"):
            file[name] = rng.normal(size=(14, 20, 18)).astype(np.float32)
    for name in ("first", "second"):
        words = {"checkpoint": checkpoint("one"), "input": tmp_path / "a.h5" / name}
        assert predict(**words, output_format="npy") == (2 if labels else 0)  # of another scan
        assert predict(**words, output_format="npy", overwrite=True) == 0
        labels.append(np.load(tmp_path / "out" / "a.npy"))
    assert (labels[0] != labels[1]).any()
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["other"], file["labels"] = np.zeros((2, 14, 20, 18), np.uint8)
    group = tmp_path / "b.ome.zarr" / "labels" / "cells"
    group.parent.mkdir(parents=True)
    volumes.write_labels(group, labels[1], tmp_path / "out" / "a.npy")
    assert predict(checkpoint=checkpoint("one"), input=group, output="zarr.npy") == 0
    capsys.readouterr()
    words = [f"predictions={group}", f"references={tmp_path / 'b.h5' / 'labels'}", "output=scores"]
    assert main(["evaluate", *words, "classes=[background,a,b,c]"]) == 0


def test_the_members_that_a_pattern_matches_are_named(predict, checkpoint, images, capsys):
    first, renamed = (checkpoint(name).parents[1] for name in ("killed", "killed.1"))
    assert predict(checkpoint=f"{first}*", input=images("a.nii")) == 0
    assert f"ensemble of {first}, {renamed}\n" in capsys.readouterr().out


def test_a_scan_that_differs_from_the_training_data_causes_a_warning(
    predict, checkpoint, small, tmp_path, capsys
):
    network = checkpoint("one")
    root, folder = Path(small[0].partition("=")[2]), tmp_path / "in"
    image = nibabel.load(sorted(root.rglob("imagesTr/*.nii.gz"))[0])
    folder.mkdir()
    nibabel.save(image, folder / "same.nii")
    louder = nibabel.Nifti1Image(image.get_fdata() * 1000, image.affine)
    nibabel.save(louder, folder / "louder.nii")
    assert predict(checkpoint=f"{network},{network}", input=folder) == 0
    captured = capsys.readouterr()
    (warning,) = [line for line in captured.err.splitlines() if "warning" in line]
    assert warning.startswith("warning: louder.nii differs from the training data: synthetic has ")
    assert "; 1 differ from the training data" in captured.out


def test_an_assumed_orientation_is_one_warning_for_all_scans(predict, checkpoint, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name in ("a.nii", "b.nii"):
        scan = np.random.default_rng(0).normal(0, 1, (16, 16, 16)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(scan, None), tmp_path / "in" / name)  # both codes are 0
    assert predict(checkpoint=checkpoint("one"), input="in") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "orientation" in line]
    assumed = "a.nii has no orientation: LAS is assumed, here and in other such scans"
    assert warnings == [f"warning: {assumed}"]


def test_a_format_without_axes_is_a_warning_for_a_network_that_was_trained_on_oriented_files(
    predict, checkpoint, tmp_path, capsys
):
    scan = np.random.default_rng(0).normal(0, 1, (16, 16, 16)).astype(np.float32)
    np.save(tmp_path / "a.npy", scan)
    assert predict(checkpoint=checkpoint("one"), input="a.npy") == 0
    assert "warning: a.npy has no orientation: RAS is assumed" in capsys.readouterr().err
