"""Every command reads and writes every format; docs/how-to/formats.md walks through all five."""

import json

import numpy as np
import pytest

from tests.cli.helpers.checkpoints import checkpoints
from tests.data.helpers.datasets import make_image, make_label, write_nnunet
from tests.data.helpers.formats import (
    turn,
    write_itk,
    write_nifti,
    write_numpy,
    write_series,
    write_tiff,
    write_zarr,
)
from unet3d.cli.main import main
from unet3d.data.formats.volumes import list_volumes, read_volume, split_suffix, write_labels

STRAIGHT = np.diag([0.75, 0.5, 2.0, 1.0])


@pytest.fixture(scope="session")
def checkpoint(small, tmp_path_factory):
    """A network for one channel."""
    words = [*small, "model.width=2", "model.depth=2"]
    return checkpoints(tmp_path_factory.mktemp("runs"), words)("one")


@pytest.fixture
def scan():
    return np.random.default_rng(0).integers(100, 999, (14, 16, 12)).astype(np.int16)


@pytest.fixture
def predict(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def command(*words: object) -> int:
        return main(["predict", f"checkpoint={checkpoint}", "device=cpu", *map(str, words)])

    return command


def write_everywhere(folder, scan, affine):
    """Write one scan in every format that can hold its grid."""
    folder.mkdir()
    write_nifti(folder / "nifti.nii.gz", scan, affine)
    write_itk(folder / "nrrd.nrrd", scan, affine)
    write_itk(folder / "mha.mha", scan, affine)
    write_series(folder / "series", scan, affine)
    if affine is STRAIGHT:
        write_tiff(folder / "tiff.tif", scan.astype(np.uint16), affine)
        write_zarr(folder / "zarr.ome.zarr", scan, affine)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("affine", [STRAIGHT, turn(0.7, 0.8, 2.5)], ids=["straight", "oblique"])
def test_a_scan_is_segmented_alike_in_every_format(predict, tmp_path, scan, affine):
    folder = write_everywhere(tmp_path / "in", scan, affine)
    assert predict("input=in", "output=out") == 0
    written = {split_suffix(file)[0]: file for file in list_volumes(tmp_path / "out")}
    suffixes = {split_suffix(file)[1] for file in written.values()}
    assert suffixes >= {".nii.gz", ".nrrd", ".mha", ".dcm"}
    assert len(written) == len(list_volumes(folder))
    expected, _ = read_volume(written["nifti"])
    assert len(np.unique(expected)) > 1
    for name, file in written.items():
        labels, grid = read_volume(file)
        np.testing.assert_array_equal(labels, expected, err_msg=name)
        np.testing.assert_allclose(grid, affine, atol=1e-5)


@pytest.mark.slow
def test_labels_have_the_format_that_is_asked_for(predict, tmp_path, scan, capsys):
    write_series(tmp_path / "in" / "a", scan, np.diag([-0.75, -0.5, 2.0, 1.0]))
    assert predict("input=in", "output=out", "output_format=nrrd", "save_probabilities=true") == 0
    assert predict("input=in/a", "output=one.mha") == 0
    assert predict("input=in", "output=out") == 0
    labels = [read_volume(tmp_path / name)[0] for name in ("out/a.nrrd", "one.mha", "out/a.dcm")]
    for other in labels[1:]:
        np.testing.assert_array_equal(other, labels[0])
    probabilities, affine = read_volume(tmp_path / "out" / "probabilities" / "a.nii")
    np.testing.assert_array_equal(probabilities.argmax(0), labels[0][0])
    np.testing.assert_allclose(affine, read_volume(tmp_path / "in" / "a")[1])
    capsys.readouterr()
    for words, problem in (
        (["input=in", "output=tif", "output_format=tif"], "cannot hold the orientation of in/a"),
        (["input=in", "output=b.nii", "output_format=tif"], "output=b.nii names a format"),
        (["input=in", "output=x", "output_format=png"], "output_format must be auto, nii.gz"),
        (["input=in/a", "output=in/a"], "must not be the folder of the images"),
    ):
        assert predict(*words) != 0
        error = capsys.readouterr().err
        assert problem in error
        assert len(error.strip().splitlines()) <= 3


WRITERS = {
    ".nrrd": write_itk,
    ".mha": write_itk,
    ".tif": write_tiff,
    ".zarr": write_zarr,
    ".npy": write_numpy,
}


def write_dataset(root, suffix, image=make_image, label=make_label):
    for n in range(3):
        for kind, array in (("images", image(n)), ("labels", label(n))):
            (root / kind).mkdir(parents=True, exist_ok=True)
            WRITERS[suffix](root / kind / f"{n}{suffix}", array, STRAIGHT)


def check(root, suffix, *words):
    patterns = [f"data.{kind}={kind}/*{suffix}" for kind in ("images", "labels")]
    options = ["data=pairs", f"data.root={root}", "data.num_classes=3", *patterns]
    return main(["check", "format=json", *options, *words])


@pytest.mark.parametrize("suffix", WRITERS)
def test_check_names_the_format_and_finds_what_is_wrong(tmp_path, suffix, capsys):
    write_dataset(tmp_path, suffix)
    assert check(tmp_path, suffix) == 0
    name = {".nrrd": "NRRD", ".mha": "MetaImage", ".tif": "TIFF", ".npy": "NumPy"}
    about = json.loads(capsys.readouterr().out)["about"]
    assert about.startswith(f"{name.get(suffix, 'OME-Zarr')}, 12 x 10 x 8 voxels of ")
    if suffix != ".zarr":
        image = tmp_path / "images" / f"0{suffix}"
        image.write_bytes(image.read_bytes()[:300])
    broken = make_image(1)
    broken[2, 3, 4] = np.nan
    WRITERS[suffix](tmp_path / "images" / f"1{suffix}", broken, STRAIGHT)
    WRITERS[suffix](tmp_path / "labels" / f"1{suffix}", make_label(1) * 3, STRAIGHT)
    WRITERS[suffix](tmp_path / "labels" / f"2{suffix}", make_label(2)[:-1], STRAIGHT)
    assert check(tmp_path, suffix) == 1
    errors = [(e["case"], e["message"]) for e in json.loads(capsys.readouterr().out)["errors"]]
    for case, message in (
        ("1", "holds NaN or infinity in 1 of 960 voxels"),
        ("1", "holds 3, 6: labels must be 0..2"),
        ("2", "has shape 11 x 10 x 8, but its image 12 x 10 x 8"),
    ):
        assert (case, message) in errors
    assert suffix == ".zarr" or "0" in {case for case, _ in errors}


def test_check_says_that_a_spacing_is_assumed_and_counts_formats(tmp_path, capsys):
    write_dataset(tmp_path, ".npy")
    assert check(tmp_path, ".npy") == 0
    (hint,) = json.loads(capsys.readouterr().out)["hints"]
    assert hint["message"] == "3 of 3 cases have no voxel spacing: 1 mm is assumed"


def test_a_dataset_of_nnunet_has_any_file_ending(tmp_path, capsys):
    write_nnunet(tmp_path, 2, ending=".nii")
    for file in [*tmp_path.rglob("*.nii")]:
        channels, affine = read_volume(file)
        write_itk(file.with_suffix(".nrrd"), np.array(channels[0]), affine)
        file.unlink()
    content = json.loads((tmp_path / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps({**content, "file_ending": ".nrrd"}))
    assert main(["check", "data=nnunet", f"data.root={tmp_path}"]) == 0
    assert "2 cases, no errors\nNRRD, 12 x 10 x 8 voxels" in capsys.readouterr().out


def test_series_and_segmentations_are_a_dataset(tmp_path, capsys):
    for n in range(2):
        folder = tmp_path / "scans" / f"p{n}"
        image = (make_image(n) * 100).astype(np.int16)
        write_series(folder, image, turn(0.7, 0.8, 2.5))
        (tmp_path / "labels").mkdir(exist_ok=True)
        write_labels(tmp_path / "labels" / f"p{n}.dcm", make_label(n), folder, ["", "a", "b"])
    words = ["data=pairs", f"data.root={tmp_path}", "data.num_classes=3"]
    words += ["data.images=scans/*/", "data.labels=labels/*.dcm"]
    assert main(["check", *words]) == 0
    assert "2 cases, no errors\nDICOM, 12 x 10 x 8 voxels" in capsys.readouterr().out
    sorted((tmp_path / "scans" / "p0").iterdir())[3].unlink()
    assert main(["check", *words]) == 1
    assert "scans/p0 has slices 2.5 to 5 mm apart" in capsys.readouterr().out


@pytest.mark.slow
def test_evaluate_matches_formats_and_refuses_other_grids(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("predictions", "references"):
        (tmp_path / folder).mkdir()
    for n, name in enumerate("abc"):
        write_itk(tmp_path / "references" / f"{name}.mha", make_label(n), STRAIGHT)
    write_nifti(tmp_path / "predictions" / "a.nii.gz", make_label(0), STRAIGHT)
    write_zarr(tmp_path / "predictions" / "b.zarr", make_label(1), STRAIGHT)
    np.save(tmp_path / "predictions" / "c.npy", make_label(2))
    words = ["predictions=predictions", "references=references", "output=scores"]
    assert main(["evaluate", *words, "draw_worst=0"]) == 1
    result = json.loads((tmp_path / "scores" / "evaluation.json").read_text())
    for name in "ab":
        assert {scores["dice"] for scores in result["cases"][name].values()} == {1.0}
    assert "predictions/c.npy has affine" in result["errors"]["c"]
