"""Bundles: what leaves is the whole pipeline, and runs without this package."""

import json
import os
import runpy
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import nibabel
import numpy as np
import pytest

import unet3d
from tests.commands.helpers.checkpoints import checkpoints
from tests.data.helpers.datasets import write_nnunet
from tests.export.helpers.hub import serve_hub
from unet3d.__main__ import main
from unet3d.errors import UsageError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY = ["model.width=4", "model.depth=2"]
MARGIN = 1e-4
"""Probabilities that are closer may be in another order in another runtime."""


@pytest.fixture(scope="module")
def scan(tmp_path_factory):
    """Return a scan with oblique axes in another order, an empty border and anisotropic voxels."""
    path = tmp_path_factory.mktemp("scans") / "a.nii.gz"
    rng = np.random.default_rng(0)
    voxels = np.zeros((26, 14, 31), np.int16)
    voxels[2:-1, 1:-2, 3:] = rng.normal(100, 30, (23, 11, 28))
    affine = np.array([[0, 0.1, -1.1, 5], [0.9, 0, 0, -3], [0, -1.6, 0, 8], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)
    return path


OPTIONS = {
    "classes": (["data.spacing_mm=[1.2,1.0,1.0]"], {"keep_largest_component": ["tube", "box"]}),
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


def run_here(bundle: Path, monkeypatch, *words: object) -> None:
    """Run the script of a bundle in this process, where onnxruntime is missing."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(sys, "argv", ["predict.py", *map(str, words)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(bundle / "scripts" / "predict.py"), run_name="__main__")


def test_the_script_needs_numpy_nibabel_and_onnxruntime(exported, scan, tmp_path):
    run_alone(exported[0], SCRIPT, scan, tmp_path / "labels.nii.gz", without="torch")
    check_labels(tmp_path / "labels.nii.gz", exported)


@pytest.mark.parametrize("exported", ["classes"], indirect=True)
def test_the_script_runs_with_torch_where_onnxruntime_is_missing(
    exported, scan, tmp_path, monkeypatch
):
    run_here(exported[0], monkeypatch, scan, tmp_path / "labels.nii.gz")
    check_labels(tmp_path / "labels.nii.gz", exported)


@pytest.mark.parametrize("exported", ["classes"], indirect=True)
def test_the_script_refuses_channels_on_different_grids(exported, scan, tmp_path, monkeypatch):
    image = nibabel.load(scan)
    other = tmp_path / "b.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj), -image.affine), other)
    with pytest.raises(SystemExit, match=f"^{other} has another grid than {scan}: resample it"):
        run_here(exported[0], monkeypatch, scan, other, tmp_path / "c.nii")


def run_monai(bundle: Path, monkeypatch, **folders: Path) -> None:
    """Run the bundle as `python -m monai.bundle run` does, where its scripts are `scripts`."""
    from monai.bundle import run

    file = bundle / "scripts" / "__init__.py"
    spec = spec_from_file_location("scripts", file, submodule_search_locations=[str(file.parent)])
    monkeypatch.setitem(sys.modules, "scripts", module := module_from_spec(spec))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(bundle)
    spec.loader.exec_module(module)
    run(config_file="configs/inference.json", **{key: str(path) for key, path in folders.items()})


@pytest.mark.filterwarnings("ignore")
def test_an_ensemble_of_networks_with_two_channels_is_one_bundle(tmp_path, small, monkeypatch):
    root = write_nnunet(tmp_path / "nnunet", 5)
    words = ["data=nnunet", f"data.root={root}", "data.normalize=[ct,zscore]", *small[1:], *TINY]
    words = [word for word in words if "data.layout" not in word]
    make = checkpoints(tmp_path / "runs", words)
    members = [make(f"member {seed}", f"seed={seed}") for seed in (0, 1)]
    segmenter = unet3d.load(members, device="cpu")
    bundle = segmenter.save(tmp_path / "bundle")
    files = [root / "imagesTr" / f"case_01_000{channel}.nii.gz" for channel in (0, 1)]
    segmenter.predict_file(files, tmp_path / "expected.nii.gz")
    run_alone(bundle, SCRIPT, *files, tmp_path / "labels.nii.gz")
    expected = np.asarray(nibabel.load(tmp_path / "expected.nii.gz").dataobj)
    labels = np.asarray(nibabel.load(tmp_path / "labels.nii.gz").dataobj)
    assert len(np.unique(expected)) > 1
    assert (labels != expected).mean() < 1e-4
    run_monai(bundle, monkeypatch, dataset_dir=root / "imagesTr", output_dir=tmp_path / "monai")
    written = sorted((tmp_path / "monai").iterdir())
    labels = np.asarray(nibabel.load(written[1]).dataobj)
    assert (labels != expected).mean() < 1e-4


def test_the_model_card_tells_of_the_run(small, tmp_path):
    run = tmp_path / "run"
    unet3d.train([*small, *TINY, "evaluation.enabled=true"], folder=run)
    card = (unet3d.load(run).save(tmp_path / "bundle") / "docs" / "README.md").read_text()
    report = json.loads((run / "report.json").read_text())
    dice = report["evaluation"]["mean"]["dice"]["mean"]
    assert f"| mean | {dice:.4f} |" in card
    assert f"torch {report['versions']['torch']}" in card
    assert "1 steps on cpu; a training step took " in card
    assert "Segmentation of ball, tube, box" in card
    assert str(run) not in card


@pytest.mark.parametrize("exported", ["classes"], indirect=True)
def test_a_model_file_that_cannot_be_used_is_refused(exported, tmp_path):
    whole = json.loads((exported[0] / "bundle.json").read_text())
    for content, message in (
        ({"format": "another"}, "is not of a bundle of unet3d"),
        ({"format_version": 2}, "has format version 2, and this unet3d reads versions up to 1"),
    ):
        (tmp_path / "bundle.json").write_text(json.dumps(whole | content))
        with pytest.raises(UsageError, match=message):
            unet3d.load(tmp_path)


@pytest.mark.parametrize("exported", ["classes"], indirect=True)
def test_a_bundle_is_downloaded_from_the_hub(exported, scan, tmp_path):
    code = (
        "import unet3d\n"
        f"unet3d.load('hf://lab/shapes', device='cpu').predict_file({str(scan)!r}, 'a.nii')\n"
        "try:\n"
        "    unet3d.load('hf://lab/nothing')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    with serve_hub("lab/shapes", exported[0]) as (address, downloaded):
        environment = {"HF_ENDPOINT": address, "HF_HOME": "cache", "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env=os.environ | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert ended.stdout.startswith("hf://lab/nothing cannot be downloaded: "), ended.stderr
    assert ended.stdout.count("\n") == 1  # requests are not logged
    assert sorted(downloaded) == ["bundle.json", "models/network_0.safetensors"]
    labels = nibabel.load(tmp_path / "a.nii")
    np.testing.assert_array_equal(np.asarray(labels.dataobj), np.asarray(exported[1].dataobj))
