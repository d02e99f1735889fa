"""What the commands beside train print and write, on the smallest input that shows it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
import yaml

from tests.contract.conftest import call
from tests.contract.helpers.datasets import save, write_decathlon

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a scan with oblique axes in another order than those of the training data."""
    voxels = np.random.default_rng(0).normal(1, 1, (18, 22, 20)).astype(np.float32)
    affine = np.array([[0, 0.1, -1.1, 5], [0.9, 0, 0, -3], [0, -1.2, 0, 8], [0, 0, 0, 1]])
    return save(tmp_path_factory.mktemp("scan") / "a.nii.gz", voxels, affine)


@pytest.fixture(scope="module")
def patch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a scan of the size of one patch, on the grid of the training data."""
    voxels = np.random.default_rng(1).normal(1, 1, (16, 16, 16)).astype(np.float32)
    return save(tmp_path_factory.mktemp("patch") / "a.nii.gz", voxels, np.diag([1, 1, 1.25, 1]))


def read(path: Path) -> np.ndarray:
    return np.asarray(nibabel.load(path).dataobj)


def read_normalized(path: Path) -> np.ndarray:
    """Return (1, 1, D, H, W), normalized as the training data."""
    voxels = read(path)
    return ((voxels - voxels.mean()) / voxels.std())[None, None].astype(np.float32)


def test_labels_have_the_grid_of_an_oblique_scan(unet3d, trained, scan, tmp_path):
    ended = unet3d("predict", f"checkpoint={trained.folder}", f"input={scan}", "output=labels")
    assert ended.code == 0, ended.err
    labels, image = nibabel.load(tmp_path / "labels" / "a.nii.gz"), nibabel.load(scan)
    assert labels.shape == image.shape
    np.testing.assert_allclose(labels.affine, image.affine, atol=1e-6)
    assert len(np.unique(labels.dataobj)) > 1


def test_labels_are_the_most_likely_class_of_saved_probabilities(unet3d, trained, scan, tmp_path):
    words = ["save_probabilities=true", "keep_largest_component=none"]
    source = [f"checkpoint={trained.folder}", f"input={scan}", "output=labels"]
    ended = unet3d("predict", *source, *words)
    assert ended.code == 0, ended.err
    (file,) = (tmp_path / "labels" / "probabilities").iterdir()
    probabilities = read(file)
    assert probabilities.shape[-1] == 4
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-2)
    assert (probabilities.argmax(-1) == read(tmp_path / "labels" / "a.nii.gz")).mean() > 0.999


def test_scans_that_are_segmented_already_are_skipped_unless_asked_for(
    unet3d, trained, patch, tmp_path
):
    words = [f"checkpoint={trained.folder}", f"input={patch}", "output=labels"]
    label = tmp_path / "labels" / "a.nii.gz"
    assert unet3d("predict", *words).code == 0
    written = label.stat().st_mtime_ns
    again = unet3d("predict", *words)
    assert (again.code, label.stat().st_mtime_ns) == (0, written)
    assert "overwrite=true" in again.out
    assert unet3d("predict", *words, "overwrite=true").code == 0
    assert label.stat().st_mtime_ns != written


@pytest.fixture(scope="module")
def expected(trained, patch, tmp_path_factory) -> np.ndarray:
    """Return the labels of `unet3d predict` for the patch."""
    output = tmp_path_factory.mktemp("expected") / "a.nii.gz"
    assert (
        call("predict", f"checkpoint={trained.folder}", f"input={patch}", f"output={output}").code
        == 0
    )
    return read(output)


def export(unet3d, trained, patch: Path, output: str, form: str) -> str:
    words = [f"checkpoint={trained.folder}", f"output={output}", f"format={form}"]
    ended = unet3d("export", *words, f"input={patch}")
    assert ended.code == 0, ended.err
    return ended.out


def test_an_onnx_file_gives_the_labels_of_predict(unet3d, trained, patch, expected, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    assert "logits differ by at most" in export(unet3d, trained, patch, "net.onnx", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    (name,) = [given.name for given in session.get_inputs()]
    (logits,) = session.run(None, {name: read_normalized(patch)})
    assert (logits[0].argmax(0) == expected).mean() > 0.999


def test_a_torch_export_gives_the_labels_of_predict(unet3d, trained, patch, expected, tmp_path):
    assert "logits differ by at most" in export(unet3d, trained, patch, "net.pt2", "torch_export")
    network = torch.export.load(tmp_path / "net.pt2").module()
    logits = network(torch.from_numpy(read_normalized(patch)))
    assert (logits[0].argmax(0).numpy() == expected).mean() > 0.999


def test_the_script_of_a_bundle_predicts_without_this_package(
    unet3d, trained, scan, patch, tmp_path
):
    pytest.importorskip("safetensors")
    export(unet3d, trained, patch, "bundle", "bundle")
    source = [f"checkpoint={trained.folder}", f"input={scan}", "output=predicted.nii.gz"]
    assert unet3d("predict", *source).code == 0
    without = (
        "import runpy, sys\nsys.modules['unet3d'] = sys.modules['torch'] = None\n"
        "runpy.run_path('scripts/predict.py', run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", without, scan, tmp_path / "labels.nii.gz"],
        cwd=tmp_path / "bundle",
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    predicted, labels = (nibabel.load(tmp_path / f"{n}.nii.gz") for n in ("predicted", "labels"))
    np.testing.assert_allclose(labels.affine, predicted.affine, atol=1e-6)
    assert len(np.unique(predicted.dataobj)) > 1
    assert (np.asarray(labels.dataobj) == np.asarray(predicted.dataobj)).mean() > 0.999


@pytest.fixture
def segmentations(tmp_path) -> Path:
    """Write two references, a cube of 4 x 4 x 4 voxels, and predictions of all and half of it."""
    reference = np.zeros((12, 12, 12), np.uint8)
    reference[4:8, 4:8, 4:8] = 1
    half = reference.copy()
    half[6:8] = 0
    for name, prediction in (("all", reference), ("half", half)):
        save(tmp_path / "references" / f"{name}.nii.gz", reference)
        save(tmp_path / "predictions" / f"{name}.nii.gz", prediction)
    return tmp_path


FOLDERS = ["predictions=predictions", "references=references", "output=scores", "draw_worst=1"]


def test_predictions_are_scored_exactly_and_the_worst_is_drawn(unet3d, segmentations):
    assert unet3d("evaluate", *FOLDERS, "metrics=volume_error").code == 0
    found = json.loads((segmentations / "scores" / "evaluation.json").read_text())
    cases = {name: scores["1"] for name, scores in found["cases"].items()}
    assert cases["all"]["dice"] == cases["all"]["iou"] == cases["all"]["surface_dice"] == 1
    assert cases["half"]["dice"] == pytest.approx(2 * 32 / (32 + 64))
    assert cases["half"]["iou"] == pytest.approx(1 / 2)
    assert cases["half"]["hd95_mm"] == pytest.approx(2)
    assert cases["half"]["volume_error"] == pytest.approx(1 / 2)
    assert found["per_class"]["1"]["dice"]["mean"] == pytest.approx(5 / 6)
    written = {path.name for path in (segmentations / "scores").iterdir()}
    assert {"evaluation.json", "evaluation.csv", "report.html", "worst"} <= written
    assert [path.name for path in (segmentations / "scores" / "worst").iterdir()] == ["1_half.png"]


def test_a_reference_without_a_prediction_fails_alone_unless_it_is_to_be_skipped(
    unet3d, segmentations
):
    (segmentations / "predictions" / "half.nii.gz").unlink()
    failed = unet3d("evaluate", *FOLDERS)
    assert failed.code == 1
    assert "half.nii.gz" in failed.err
    assert "all" in json.loads((segmentations / "scores" / "evaluation.json").read_text())["cases"]
    assert unet3d("evaluate", *FOLDERS, "missing_predictions=skip").code == 0
    found = json.loads((segmentations / "scores" / "evaluation.json").read_text())
    assert found["cases"].keys() == {"all"}


def test_a_plan_is_an_experiment_that_trains(unet3d, tmp_path):
    root = write_decathlon(tmp_path / "scans", [f"case_{number}" for number in range(5)])
    narrow = ["model.width=4", "model.convs_per_level=1", "measure_time=false"]
    words = ["data=decathlon", f"data.root={root}", "budget_gib=1", "name=mine", *narrow]
    planned = unet3d("plan", *words)
    assert planned.code == 0, planned.err
    plan = yaml.safe_load((tmp_path / "conf" / "experiment" / "mine.yaml").read_text())
    assert plan["data"]["patch_size"] == [16, 16, 16]
    assert plan["data"]["spacing_mm"] == [1, 1, 2]
    limits = ["trainer.max_steps=1", "trainer.max_epochs=null", "evaluation.enabled=false"]
    limits += ["memory.estimate=false", "trainer.accelerator=cpu", "data.num_workers=0"]
    ended = unet3d("train", "experiment=mine", *limits, "hydra.run.dir=run")
    assert ended.code == 0, ended.err
    config = json.loads((tmp_path / "run" / "report.json").read_text())["config"]
    assert config["data"]["batch_size"] == plan["data"]["batch_size"]
    assert config["model"]["width"] == 4


NARROW = ["data.patch_size=[32,16,16]", "model.width=4", "model.depth=2"]


def test_suggestions_are_overrides_that_fit_the_budget(unet3d, tmp_path):
    words = ["precisions=[bf16]", "patches=[1]", "strategies=[fused]", "format=json"]
    ended = unet3d("suggest", "budget_gib=1", *NARROW, *words, "output=found.json")
    assert ended.code == 0, ended.err
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["peak_reserved_bytes"] < 2**30
    assert {"precision=bf16", "checkpointing=fused"} <= {*found["overrides"]}
    composed = unet3d("train", *found["overrides"], "--cfg", "job")
    assert yaml.safe_load(composed.out)["data"]["batch_size"] > 1


LEANEST = ["precision=bf16", "checkpointing=leanest"]


def test_an_estimate_has_the_peak_of_each_phase_and_every_layer(unet3d, tmp_path):
    ended = unet3d("memory", *NARROW, *LEANEST, "format=json", "output=memory.json")
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "memory.json").read_text())
    phases = {name: phase["allocated_bytes"] for name, phase in found["phases"].items()}
    assert phases.keys() == {"forward", "backward", "optimizer", "validation"}
    assert found["peak_allocated_bytes"] == max(phases.values())
    assert sum(found["kinds"].values()) == found["peak_allocated_bytes"]
    assert {layer["phase"] for layer in found["layers"]} >= {"forward", "backward"}


def test_an_estimate_is_a_table_unless_a_format_is_chosen(unet3d):
    ended = unet3d("memory", *NARROW, *LEANEST)
    assert ended.code == 0, ended.err
    first_words = {line.split()[0] for line in ended.out.splitlines() if line.strip()}
    assert {"forward", "backward", "optimizer", "validation", "parameters"} <= first_words


def test_a_learning_rate_is_suggested_from_a_curve_of_rising_ones(unet3d, small, tmp_path):
    words = ["steps=20", "min_lr=1e-5", "max_lr=1e-1", "format=json", "output=lr.json"]
    ended = unet3d("lr", *small, *words)
    assert ended.code == 0, ended.err
    curve = json.loads((tmp_path / "lr.json").read_text())
    assert curve["lr"] == sorted(curve["lr"])
    assert (curve["lr"][0], curve["lr"][-1]) == pytest.approx((1e-5, 1e-1))
    assert len(curve["loss"]) == 20
    assert curve["suggestion"] in curve["lr"]


def test_learning_rates_are_tried_on_the_weights_that_a_run_starts_from(
    unet3d, small, trained, tmp_path
):
    words = ["lr", *small, "steps=20", "format=json", "output=lr.json"]
    losses = []
    for start in ("null", trained.folder):
        ended = unet3d(*words, f"init_from={start}")
        assert ended.code == 0, ended.err
        losses.append(json.loads((tmp_path / "lr.json").read_text())["loss"])
    assert losses[0] != losses[1]


def test_a_search_trains_and_compares_its_trials(unet3d, small, tmp_path):
    pytest.importorskip("optuna")
    words = ["space={pool:[max,avg]}", "trials=2", "logger=none", "hydra.run.dir=search"]
    ended = unet3d("search", *small, *words)
    assert ended.code == 0, ended.err
    trials = json.loads((tmp_path / "search" / "search.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "complete"]
    assert all(trial["values"]["pool"] in ("max", "avg") for trial in trials)
    assert "best val/dice" in ended.out


def test_doctor_describes_the_machine_and_the_configured_run_as_json(unet3d, small, tmp_path):
    assert unet3d("doctor", *small, "format=json", "output=doctor.json").code == 0
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["gpus"] == [] or found["driver"]
    assert found["run"]["device"] == "cpu"
    assert found["run"]["peak"] > 0
    assert {"requested", "used"} <= found["run"]["precision"].keys()
