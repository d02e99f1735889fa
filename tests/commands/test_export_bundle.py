"""Bundles: what leaves is the whole pipeline, and runs without this package."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import nibabel
import numpy as np
import pytest

import unet3d
from tests.commands.helpers.checkpoints import checkpoints
from tests.data.helpers.datasets import write_nnunet
from unet3d.__main__ import main
from unet3d.errors import UsageError
from unet3d.export.bundle import write_description

pytestmark = pytest.mark.slow

TINY = ["model.width=4", "model.depth=2"]
MARGIN = 1e-4
"""Probabilities that are closer may be in another order in another runtime."""


@pytest.fixture(scope="module")
def scan(tmp_path_factory):
    """Return a scan in microns with oblique axes in another order and an empty border."""
    path = tmp_path_factory.mktemp("scans") / "a.nii.gz"
    rng = np.random.default_rng(0)
    voxels = np.zeros((26, 14, 31), np.int16)
    voxels[2:-1, 1:-2, 3:] = rng.normal(100, 30, (23, 11, 28))
    affine = np.array([[0, 0.1, -1.1, 5], [0.9, 0, 0, -3], [0, -1.6, -0.06875, 8], [0, 0, 0, 1]])
    image = nibabel.Nifti1Image(voxels, np.diag([1e3, 1e3, 1e3, 1.0]) @ affine)
    image.header.set_xyzt_units("micron")
    nibabel.save(image, path)
    return path


OPTIONS = {
    "classes": (
        ["data.spacing_mm=[1.2,1.0,1.0]", "data.label_values=[0,2,1,3]"],
        {"keep_largest_component": ["tube", "box"]},
    ),
    "regions": (
        [
            "data.regions={whole:[1,2,3],core:[2,3],inner:[3]}",
            "data.normalize=[zscore_nonzero]",
            "data.orientation=LPS",
            "data.spacing_mm=[4,1,1]",
        ],
        {},
    ),
}


@pytest.fixture(scope="module", params=OPTIONS)
def exported(request, checkpoint, scan, tmp_path_factory):
    """Return a bundle, and the labels and the probabilities of its checkpoint for the scan."""
    words, metadata = OPTIONS[request.param]
    path, folder = checkpoint(request.param, *words, **metadata), tmp_path_factory.mktemp("out")
    bundle = folder / "bundle"
    words = [f"checkpoint={path}", f"output={bundle}", "format=bundle", f"input={scan}"]
    assert main(["export", *words]) == 0
    words = [f"checkpoint={path}", f"input={scan}", f"output={folder / 'labels'}"]
    assert main(["predict", *words, "save_probabilities=true"]) == 0
    labels = nibabel.load(folder / "labels" / "a.nii.gz")
    values = nibabel.load(folder / "labels" / "probabilities" / "a.nii")
    return bundle, labels, np.asarray(values.dataobj, np.float64), "regions" in request.param


def check_labels(file: Path, exported) -> None:
    """Compare labels with those of predict, except where its logits are nearly equal."""
    _, expected, values, has_regions = exported
    written = nibabel.load(file)
    assert written.get_data_dtype() == np.uint8
    np.testing.assert_allclose(written.affine, expected.affine, atol=1e-6)
    labels, reference = np.asarray(written.dataobj), np.asarray(expected.dataobj)
    assert len(np.unique(reference)) > 2
    best = np.sort(values, axis=-1)
    margin = np.abs(values - 0.5).min(-1) if has_regions else best[..., -1] - best[..., -2]
    assert (margin > MARGIN).mean() > 0.99
    np.testing.assert_array_equal(labels[margin > MARGIN], reference[margin > MARGIN])


def run_alone(bundle: Path, code: str, *words: object, without: str = "torch") -> None:
    """Run code in the folder of the bundle, where unet3d and another package are missing."""
    head = f"import runpy, sys\nsys.modules['unet3d'] = sys.modules['{without}'] = None\n"
    command = [sys.executable, "-W", "ignore", "-c", head + code, *map(str, words)]
    ran = subprocess.run(command, cwd=bundle, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


SCRIPT = "runpy.run_path('scripts/predict.py', run_name='__main__')"
MONAI = "runpy.run_module('monai.bundle', run_name='__main__')"


def run_here(bundle: Path, monkeypatch, *words: object) -> None:
    """Run the script of a bundle in this process, where onnxruntime is missing."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(sys, "argv", ["predict.py", *map(str, words)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(bundle / "scripts" / "predict.py"), run_name="__main__")


@pytest.mark.parametrize("exported", ["regions"], indirect=True)
def test_the_script_needs_numpy_nibabel_and_onnxruntime(exported, scan, tmp_path):
    run_alone(exported[0], SCRIPT, scan, tmp_path / "labels.nii.gz", without="torch")
    check_labels(tmp_path / "labels.nii.gz", exported)


@pytest.mark.parametrize("exported", ["classes"], indirect=True)
def test_the_script_refuses_nan(exported, scan, tmp_path, monkeypatch):
    image = nibabel.load(scan)
    values = image.get_fdata(dtype=np.float32)
    values.flat[0] = np.nan
    nibabel.save(nibabel.Nifti1Image(values, image.affine), tmp_path / "nan.nii.gz")
    with pytest.raises(SystemExit, match="NaN or infinite"):
        run_here(exported[0], monkeypatch, tmp_path / "nan.nii.gz", tmp_path / "labels.nii.gz")


@pytest.mark.parametrize("exported", ["classes"], indirect=True)
def test_the_script_runs_with_torch_where_onnxruntime_is_missing(
    exported, scan, tmp_path, monkeypatch
):
    run_here(exported[0], monkeypatch, scan, tmp_path / "labels.nii.gz")
    check_labels(tmp_path / "labels.nii.gz", exported)


@pytest.fixture(scope="module")
def ensemble(small, tmp_path_factory):
    """Return a bundle of two networks with two channels, a scan, and its labels by predict."""
    folder = tmp_path_factory.mktemp("ensemble")
    root = write_nnunet(folder / "nnunet", 5)
    words = ["data=nnunet", f"data.root={root}", "data.normalize=[ct,zscore]", *small[1:], *TINY]
    words = [word for word in words if "data.layout" not in word]
    make = checkpoints(folder / "runs", words)
    members = [make(f"member {seed}", f"seed={seed}") for seed in (0, 1)]
    segmenter = unet3d.load(members, device="cpu")
    files = [root / "imagesTr" / f"case_01_000{channel}.nii.gz" for channel in (0, 1)]
    labels = nibabel.load(segmenter.predict_file(files, folder / "labels.nii.gz"))
    return segmenter.save(folder / "bundle"), files, np.asarray(labels.dataobj)


def test_an_ensemble_of_networks_with_two_channels_is_one_bundle(ensemble, tmp_path):
    bundle, files, expected = ensemble
    run_alone(bundle, SCRIPT, *files, tmp_path / "labels.nii.gz")
    labels = np.asarray(nibabel.load(tmp_path / "labels.nii.gz").dataobj)
    assert len(np.unique(expected)) > 1
    assert (labels != expected).mean() < 1e-4


@pytest.mark.long
def test_monai_runs_the_bundle(ensemble, tmp_path):
    bundle, files, expected = ensemble
    words = ["run", "--config_file", "configs/inference.json"]
    folders = ["--dataset_dir", files[0].parent, "--output_dir", tmp_path]
    run_alone(bundle, MONAI, *words, *folders, without="onnxruntime")
    labels = np.asarray(nibabel.load(sorted(tmp_path.iterdir())[1]).dataobj)
    assert (labels != expected).mean() < 1e-4


@pytest.mark.parametrize(("value", "dtype"), [(255, "uint8"), (1035, "uint16")])
def test_monai_saves_values_that_a_byte_cannot_hold(tmp_path, value, dtype):
    (tmp_path / "models").mkdir()
    pipeline = {
        "classes": ["background", "a"],
        "labels": [0, value],
        "outputs": ["background", "a"],
    }
    pipeline |= {"unet3d": "1.0", "channels": ["image"], "patch_size": [8, 8, 8]}
    write_description(tmp_path, pipeline, [], "")
    config = json.loads((tmp_path / "configs" / "inference.json").read_text())
    assert config["postprocessing"]["transforms"][-1]["output_dtype"] == dtype


@pytest.mark.parametrize("exported", ["classes"], indirect=True)
def test_a_bundle_is_downloaded_from_the_hub(exported, scan, tmp_path, monkeypatch):
    def download(name, *, revision, allow_patterns):
        if (name, revision) != ("lab/shapes", "v2"):
            raise OSError("404 Client Error.\n\nRepository Not Found")
        for path in {path for pattern in allow_patterns for path in exported[0].glob(pattern)}:
            shutil.copy(path, tmp_path / "cache" / path.relative_to(exported[0]))
        return str(tmp_path / "cache")

    (tmp_path / "cache" / "models").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    segmenter = unet3d.load("hf://lab/shapes@v2", device="cpu")
    labels = nibabel.load(segmenter.predict_file(scan, tmp_path / "a.nii"))
    np.testing.assert_array_equal(np.asarray(labels.dataobj), np.asarray(exported[1].dataobj))
    message = "^hf://lab/shapes cannot be downloaded: 404 Client Error. Repository Not Found$"
    with pytest.raises(UsageError, match=message):
        unet3d.load("hf://lab/shapes")
    with pytest.raises(UsageError, match=r"must be hf://OWNER/NAME or hf://OWNER/NAME@REVISION"):
        unet3d.load("hf://shapes")
