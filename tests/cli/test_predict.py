"""`unet3d predict` on small scans, with networks that were never trained."""

import os
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from tests.cli.helpers.checkpoints import checkpoints
from unet3d.cli.main import main
from unet3d.data.formats.volumes import SUFFIX_LIST

pytestmark = pytest.mark.slow

TINY = ["model.width=2", "model.depth=2"]


@pytest.fixture(scope="session")
def checkpoint(small, tmp_path_factory):
    """Return a function that makes checkpoints as a run saves them."""
    return checkpoints(tmp_path_factory.mktemp("runs"), [*small, *TINY])


@pytest.fixture
def images(tmp_path):
    """Return a function that writes scans."""

    def made(*names: str, affine=None, size=(18, 20, 14)):
        folder = tmp_path / "in"
        folder.mkdir(exist_ok=True)
        for number, name in enumerate(names):
            voxels = np.random.default_rng(number).normal(0, 1, size).astype(np.float32)
            image = nibabel.Nifti1Image(voxels, np.eye(4) if affine is None else affine)
            nibabel.save(image, folder / name)
        return folder

    return made


@pytest.fixture
def predict(tmp_path, monkeypatch):
    """Run `unet3d predict` in an empty working folder, on the CPU."""
    monkeypatch.chdir(tmp_path)

    def command(**words: object) -> int:
        words = {"output": tmp_path / "out", "device": "cpu"} | words
        return main(["predict", *(f"{key}={value}" for key, value in words.items())])

    return command


def labels(path):
    return np.asarray(nibabel.load(path).dataobj)


def list_labels(folder):
    """Return the names of the files that users see."""
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")


def test_labels_have_the_names_of_their_images(predict, checkpoint, images, tmp_path, capsys):
    folder = images("a_0000.nii.gz", "b.nii")
    assert predict(checkpoint=checkpoint("one"), input=folder) == 0
    assert list_labels(tmp_path / "out") == ["a.nii.gz", "b.nii"]
    assert len(np.unique(labels(tmp_path / "out" / "b.nii"))) > 1
    shown = capsys.readouterr().out
    assert "a 18x20x14, 4 classes: " in shown
    assert "MiB of RAM" in shown
    assert "2 of 2 scans segmented" in shown


def test_voxels_outside_of_the_crop_are_background(predict, checkpoint, images, tmp_path):
    folder = images("a.nii")
    voxels = np.zeros((40, 41, 42), np.float32)
    voxels[10:28, 3:23, 20:34] = labels(folder / "a.nii")
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / "wide.nii")
    assert predict(checkpoint=checkpoint("one"), input=folder) == 0
    wide = labels(tmp_path / "out" / "wide.nii")
    np.testing.assert_array_equal(wide[10:28, 3:23, 20:34], labels(tmp_path / "out" / "a.nii"))
    assert wide.sum() == wide[10:28, 3:23, 20:34].sum()


def test_labels_of_another_checkpoint_are_made_again_and_a_line_says_so(
    predict, checkpoint, images, tmp_path, capsys
):
    folder, one, other = images("a.nii", "b.nii"), checkpoint("one"), checkpoint("other", "seed=1")
    assert predict(checkpoint=other, input=folder, output=tmp_path / "expected") == 0
    assert predict(checkpoint=one, input=folder) == 0
    capsys.readouterr()
    assert predict(checkpoint=other, input=folder) == 0
    shown = capsys.readouterr().out
    assert "2 labels are of another checkpoint: predicting them again\n" in shown
    assert "2 of 2 scans segmented" in shown
    for name in ("a.nii", "b.nii"):
        expected = labels(tmp_path / "expected" / name)
        np.testing.assert_array_equal(labels(tmp_path / "out" / name), expected)
    assert predict(checkpoint=other, input=folder) == 0
    assert "2 already segmented, skipped" in capsys.readouterr().out


def test_labels_of_a_scan_that_was_replaced_are_made_again(
    predict, checkpoint, images, tmp_path, capsys
):
    words = {"checkpoint": checkpoint("one"), "input": images("a.nii", "b.nii")}
    assert predict(**words) == 0
    before = labels(tmp_path / "out" / "b.nii").copy()
    times = (tmp_path / "in" / "b.nii").stat()
    shutil.copy(tmp_path / "in" / "a.nii", tmp_path / "in" / "b.nii")
    os.utime(tmp_path / "in" / "b.nii", ns=(times.st_atime_ns, times.st_mtime_ns))
    capsys.readouterr()
    assert predict(**words) == 0
    shown = capsys.readouterr().out
    assert "1 label is of another scan: predicting it again" in shown
    assert "1 already segmented, skipped" in shown
    after = labels(tmp_path / "out" / "b.nii")
    np.testing.assert_array_equal(after, labels(tmp_path / "out" / "a.nii"))
    assert (before != after).any()


def test_labels_of_other_options_are_made_again(predict, checkpoint, images, capsys):
    words = {"checkpoint": checkpoint("one"), "input": images("a.nii")}
    assert predict(**words) == 0
    for changed in ({"overlap": 0.25}, {"tta": "[0]"}, {"keep_largest_component": "[ball]"}):
        words |= changed
        capsys.readouterr()
        assert predict(**words) == 0
        shown = capsys.readouterr().out
        assert "1 label is of other options: predicting it again" in shown
    assert predict(**words, batch_size=2, memory_gib=1, prefetch=False) == 0  # equal labels
    assert "1 already segmented, skipped" in capsys.readouterr().out


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
    assert labels(tmp_path / "out" / "b.nii").shape == (18, 20, 14)


def test_labels_that_were_corrected_are_not_replaced_by_those_of_another_checkpoint(
    predict, checkpoint, images, tmp_path
):
    folder = images("a.nii")
    assert predict(checkpoint=checkpoint("one"), input=folder) == 0
    (tmp_path / "out" / "a.nii").write_bytes(b"mine")
    assert predict(checkpoint=checkpoint("other", "seed=1"), input=folder) == 2
    assert (tmp_path / "out" / "a.nii").read_bytes() == b"mine"


def test_outputs_that_were_half_replaced_are_made_again(
    predict, checkpoint, images, tmp_path, monkeypatch
):
    folder, one, other = images("a.nii"), checkpoint("one"), checkpoint("other", "seed=1")
    words = {"input": folder, "save_probabilities": True}
    file = tmp_path / "out" / "probabilities" / "a.nii"
    assert predict(**words, checkpoint=one) == 0
    first = file.read_bytes()

    def stop(image, path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(nibabel, "save", stop)
        assert predict(**words, checkpoint=other) == 130
    assert file.read_bytes() != first
    assert predict(**words, checkpoint=one) == 0
    assert file.read_bytes() == first


@pytest.fixture(scope="session")
def two_channels(checkpoint, tmp_path_factory):
    """Return a checkpoint whose network takes T1 and T2."""
    content = torch.load(checkpoint("two", "data.in_channels=1"), weights_only=True)
    weights = content["state_dict"]
    first = next(name for name, w in weights.items() if w.ndim == 5 and w.shape[1] == 1)
    weights[first] = weights[first].repeat(1, 2, 1, 1, 1)
    content["unet3d"]["config"]["model"]["in_channels"] = 2
    content["unet3d"]["config"]["data"]["in_channels"] = 2
    content["unet3d"]["channels"] = ["T1", "T2"]
    content["unet3d"]["preprocessing"]["normalize"] = ["zscore", "zscore"]
    content["unet3d"]["training_statistics"] = None
    path = tmp_path_factory.mktemp("two") / "two.ckpt"
    torch.save(content, path)
    return path


def test_a_missing_channel_is_named_and_the_others_are_segmented(
    predict, two_channels, images, tmp_path, capsys
):
    folder = images("a_0000.nii", "a_0001.nii", "b_0000.nii", "c.nii")
    assert predict(checkpoint=two_channels, input=folder) == 1
    assert list_labels(tmp_path / "out") == ["a.nii"]
    captured = capsys.readouterr().err
    assert "b_0001.nii is missing" in captured
    assert "c.nii has 1 channels, but the network takes 2: T1, T2" in captured


def test_too_little_memory_is_an_error_of_the_case(predict, checkpoint, images, capsys):
    words = {"checkpoint": checkpoint("one"), "input": images("a.nii")}
    assert predict(**words, memory_gib=0.001) == 3
    captured = capsys.readouterr()
    assert "of RAM" in captured.err
    assert "0 of 1 scans segmented" in captured.out


@pytest.mark.parametrize("order", [None, [2, 3, 3]])
def test_regions_become_labels_in_training_and_inference(
    predict, checkpoint, images, tmp_path, order
):
    regions = ["data.regions={whole:[1,2,3],core:[2,3],inner:[3]}"]
    regions += [] if order is None else [f"data.region_labels={order}"]
    folder = images("a.nii")
    words = {"checkpoint": checkpoint(f"regions {order}", *regions), "input": folder}
    assert predict(**words, save_probabilities=True) == 0
    found = labels(tmp_path / "out" / "probabilities" / "a.nii")
    assert found.shape[-1] == 3
    expected = np.zeros(found.shape[:-1])
    for region, label in enumerate(order or [1, 2, 3]):
        expected[found[..., region] > 0.5] = label
    np.testing.assert_array_equal(labels(tmp_path / "out" / "a.nii"), expected)
    assert len(np.unique(expected)) >= len(set(order or [1, 2, 3]))


def test_only_axes_that_training_flipped_are_mirrored(
    predict, checkpoint, images, tmp_path, capsys
):
    folder = images("a.nii")
    flipped = checkpoint("flipped", "augmentation.flip_axes=[1]")
    never = checkpoint("never", "augmentation.flip_p=0")
    nothing = "nothing to mirror, because there is no axis that {} flipped"
    for network, line in (
        (flipped, "mirroring the axes that training flipped: [1]"),
        (never, nothing.format("training")),
        (f"{never},{flipped}", nothing.format("the training of every network")),
    ):
        words = {"checkpoint": network, "input": folder, "overwrite": True}
        assert predict(**words, tta="true") == 0
        assert f"tta=true: {line}\n" in capsys.readouterr().out
        mirrored = labels(tmp_path / "out" / "a.nii").tobytes()
        assert predict(**words, tta="false") == 0
        is_equal = labels(tmp_path / "out" / "a.nii").tobytes() == mirrored
        assert is_equal == (network != flipped)
    capsys.readouterr()
    assert predict(checkpoint=flipped, input=folder, tta="[0,1]", output=tmp_path / "no") == 2
    error = capsys.readouterr().err
    assert error.startswith("unet3d: tta=[0, 1]: training flipped only the axes [1], and a network")
    assert error.count("\n") == 1
    assert not (tmp_path / "no").exists()


def test_a_run_folder_means_its_best_checkpoint_and_the_output_can_be_a_file(
    predict, checkpoint, images, tmp_path
):
    run = checkpoint("one").parents[1]
    output = tmp_path / "deep" / "a, b (1).nii.gz"
    assert predict(checkpoint=run, input=images("a.nii") / "a.nii", output=output) == 0
    assert list_labels(output.parent) == [output.name]


def test_processes_share_the_scans_and_give_the_files_of_one(
    predict, checkpoint, images, tmp_path, capfd
):
    folder = images("a.nii", "b.nii", "c.nii", "d.nii", "e.nii")
    (folder / "c.nii").write_bytes(b"no scan")
    words = {"checkpoint": checkpoint("one"), "input": folder}
    assert predict(**words) == 1
    alone = {p.name: p.read_bytes() for p in (tmp_path / "out").glob("[!.]*")}
    (tmp_path / "out" / "b.nii").unlink()
    capfd.readouterr()
    assert predict(**words, output=tmp_path / "shared", devices=2) == 1
    assert {p.name: p.read_bytes() for p in (tmp_path / "shared").glob("[!.]*")} == alone
    captured = capfd.readouterr()
    assert captured.out.count("UNet3D, ") == 1
    assert "4 of 5 scans segmented" in captured.out
    assert "1 failed:\n  c: " in captured.err
    assert predict(**words, output=tmp_path / "shared", devices=2) == 1
    assert "4 already segmented, skipped" in capfd.readouterr().out


def test_ctrl_c_has_exit_code_130_and_leaves_no_partial_file(
    predict, checkpoint, images, tmp_path, monkeypatch
):
    from unet3d.data.formats import nifti

    def interrupted(image, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    words = {"checkpoint": checkpoint("one"), "input": images("a.nii", "b.nii")}
    with monkeypatch.context() as patched:
        patched.setattr(nibabel, "save", interrupted)
        assert predict(**words) == 130
    assert list_labels(tmp_path / "out") == []
    assert nifti.atomic_write is not None
    assert predict(**words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"checkpoint": "broken.ckpt"}, "incomplete or not a checkpoint"),
        ({"checkpoint": "strange.ckpt"}, "not a checkpoint of unet3d"),
        ({"checkpoint": "in"}, "found neither best.ckpt nor last.ckpt"),
        ({"checkpoint": "one,three"}, "cannot form an ensemble: classes is ["),
        ({"checkpoint": "one,wide"}, "ensemble: data.patch_size is [16, 16, 16] and [8, 8, 8]"),
        ({"checkpoint": "one,spaced"}, "ensemble: spacing_mm is None and [2.0, 2.0, 2.0]"),
        ({"input": "nowhere"}, "no file or folder"),
        ({"output": "in"}, "must not be the folder of the images"),
        ({"output": "out.nii"}, "is one file, but there are 2 scans"),
        ({"output": "broken.ckpt"}, "must be a folder"),
        ({"overlap": 1}, "overlap must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"tta": "[0,3]"}, "tta must be"),
        ({"precision": 17}, "precision must be one of"),
        ({"precision": "16-true"}, "needs a GPU"),
        ({"device": "cuda"}, "device=cuda"),
        ({"memory_gib": -1}, "memory_gib must be"),
        ({"backend": "tensorrt"}, "backend must be one of torch, onnx, openvino"),
        ({"skip_background": "true"}, "skip_background must be a number >= 0 and below 1"),
        ({"devices": 0}, "devices must be auto or an int >= 1"),
        ({"devices": 2, "checkpoint": "none.ckpt"}, "no checkpoint at"),
        (
            {"keep_largest_component": "lung"},
            "keep_largest_component must be some of the classes ball",
        ),
    ],
    ids=str,
)
def test_a_usage_error_is_one_line_with_exit_code_2(
    predict, checkpoint, images, tmp_path, capsys, words, message
):
    if words.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    images("a.nii", "b.nii")
    made = {
        "one": checkpoint("one"),
        "three": checkpoint("three", "data.num_classes=5"),
        "wide": checkpoint("wide", "data.patch_size=[8,8,8]"),
        "spaced": checkpoint("spaced", "data.spacing_mm=[2,2,2]"),
    }
    (tmp_path / "broken.ckpt").write_bytes(made["one"].read_bytes()[:1000])
    torch.save({"state_dict": {}}, tmp_path / "strange.ckpt")
    asked = ",".join(str(made.get(w, w)) for w in str(words.get("checkpoint", "one")).split(","))
    capsys.readouterr()
    assert predict(**{"input": "in"} | words | {"checkpoint": asked}) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.startswith("unet3d: ")
    assert "\n" not in error


@pytest.mark.parametrize("output", ["labels.png", "out/labels.gz", "a.stl"])
def test_another_ending_of_the_output_is_refused_before_a_network_is_loaded(
    predict, capsys, output
):
    assert predict(checkpoint="none.ckpt", input="none", output=output) == 2
    (line,) = capsys.readouterr().err.splitlines()
    start = f"unet3d: output={output} must be a folder, or for a single scan a file that ends in"
    assert line == f"{start} {SUFFIX_LIST}"


def test_windows_that_do_not_fit_have_exit_code_3(predict, checkpoint, images, capsys):
    words = {"checkpoint": checkpoint("one"), "input": images("a.nii")}
    assert predict(**words, batch_size=10**9) == 3
    assert "windows of 16x16x16 do not fit in the RAM" in capsys.readouterr().err


def test_a_scan_that_differs_from_the_training_data_causes_a_warning(
    predict, checkpoint, small, tmp_path, capsys
):
    network = checkpoint("one")
    training = torch.load(network, weights_only=True)["unet3d"]["training_statistics"]
    assert training["cases"] == 4
    root = Path(next(word for word in small if word.startswith("data.root=")).partition("=")[2])
    image = nibabel.load(sorted(root.rglob("imagesTr/*.nii.gz"))[0])
    folder = tmp_path / "in"
    folder.mkdir()
    nibabel.save(image, folder / "same.nii")
    louder = nibabel.Nifti1Image(image.get_fdata() * 1000, image.affine)
    nibabel.save(louder, folder / "louder.nii")
    assert predict(checkpoint=f"{network},{network}", input=folder) == 0
    captured = capsys.readouterr()
    (warning,) = [line for line in captured.err.splitlines() if "warning" in line]
    assert warning.startswith("warning: louder.nii differs from the training data: synthetic has ")
    assert "2 of 2 scans segmented" in captured.out
    assert "; 1 differ from the training data" in captured.out
    earlier = checkpoint("earlier", training_statistics=None)
    assert predict(checkpoint=earlier, input=folder, overwrite=True) == 0
    assert "warning" not in capsys.readouterr().err
