"""The names that `import unet3d` gives, and what train() and evaluate() return."""

import inspect
import json
import subprocess
import sys

import nibabel
import numpy as np
import pytest
from scipy.ndimage import binary_erosion, distance_transform_edt

import unet3d as package
from tests.contract.conftest import ROOT

KEYWORDS = {
    "ApproxMedianPool3d": "kernel_size stride padding tau",
    "AvgPool3d": "kernel_size stride padding",
    "MaxPool3d": "kernel_size stride padding",
    "MedianPool3d": "kernel_size stride padding",
    "EvaluationResult": "mean per_class cases errors content files",
    "TrainingResult": "folder checkpoint metrics report",
    "UNet3D": "in_channels num_classes channels depth width max_width decoder_channels "
    "convs_per_level halve_first_conv residual_blocks stochastic_depth kernel_size pool_kernel "
    "norm activation negative_slope upsampling deep_supervision pool fused",
    "estimate_memory": "model input_shape loss optimizer precision device",
    "estimate_step": "build device budget_gib",
    "evaluate": "predictions references checkpoint output images classes regions annotated "
    "group_by ignore_label tolerance_mm metrics missing_predictions draw_worst workers "
    "allow_targets",
    "load": "checkpoint device precision overlap batch_size tta memory_gib "
    "keep_largest_component allow_targets backend skip_background flip_axes",
    "replace_pooling": "model pool",
    "train": "overrides folder config_dir log",
    "use_fast_depthwise": "network",
}
METHODS = {
    "predict": "self image spacing_mm affine",
    "predict_file": "self image output",
    "predict_files": "self images output overwrite",
    "save": "self folder",
}
DEFAULTS = {
    "UNet3D": {"depth": 4, "width": 32, "norm": "batch", "pool": "max", "fused": True},
    "load": {"device": "auto", "overlap": 0.5, "batch_size": 1, "tta": "auto"},
    "evaluate": {"tolerance_mm": 1.0, "missing_predictions": "error", "draw_worst": 5},
    "estimate_memory": {"precision": "32", "device": "cuda"},
    "estimate_step": {"device": "cuda", "budget_gib": None},
    "ApproxMedianPool3d": {"stride": None, "padding": 0, "tau": 0.1},
}


def test_the_public_names_and_their_arguments_stay():
    assert sorted(package.__all__) == sorted([*KEYWORDS, "Segmenter"])
    assert set(package.__all__) <= set(dir(package))
    for name, arguments in KEYWORDS.items():
        signature = inspect.signature(getattr(package, name))
        assert list(signature.parameters) == arguments.split(), name
        for key, value in DEFAULTS.get(name, {}).items():
            assert signature.parameters[key].default == value, (name, key)
    for name, arguments in METHODS.items():
        signature = inspect.signature(getattr(package.Segmenter, name))
        assert list(signature.parameters) == arguments.split(), name
    with pytest.raises(AttributeError):
        package.no_such_name  # noqa: B018


def test_importing_the_package_imports_no_torch():
    code = "import unet3d, sys; assert 'torch' not in sys.modules; assert unet3d.__version__"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    lines = []
    words = [*small, "evaluation.enabled=true", "model.width=4", "model.depth=2"]
    folder = tmp_path_factory.mktemp("python") / "a run (1)"
    return package.train(words, folder=folder, log=lines.append), lines


def test_training_returns_the_checkpoint_the_metrics_and_the_report(trained):
    result, lines = trained
    assert result.checkpoint == result.folder / "checkpoints" / "best.ckpt"
    assert result.checkpoint.exists()
    report = json.loads((result.folder / "report.json").read_text())
    assert set(result.report) == set(report)
    assert result.report["config"] == report["config"]
    assert result.report["parameters"] == report["parameters"] == 4976
    assert (report["finished"], report["steps"]) == (True, 1)
    assert result.metrics["dice"] == report["evaluation"]["mean"]["dice"]["mean"]
    assert {"dice", "hd95_mm", "peak_mib", "step_seconds"} >= set(result.metrics)
    assert any("UNet3D" in line for line in lines)
    assert not any("\n" in line for line in lines)


def test_training_prints_nothing_and_resumes(trained, small, capfd):
    words = [*small, "model.width=4", "model.depth=2", "trainer.max_steps=2", "resume=auto"]
    capfd.readouterr()
    result = package.train(words, folder=trained[0].folder)
    assert result.report["steps"] == 2
    assert capfd.readouterr() == ("", "")


def test_options_of_the_user_are_found_in_a_folder(small, tmp_path):
    option = tmp_path / "options" / "experiment" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("# @package _global_\nfold: none\nmodel:\n  width: 2\n  depth: 2\n")
    result = package.train(
        [*small, "experiment=mine"], folder=tmp_path / "run", config_dir=tmp_path / "options"
    )
    assert result.report["config"]["fold"] == "none"
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["pol=median"], ["pol", "pool"]),
        (["pool=medan"], ["medan", "median"]),
        (["model.widht=8"], ["model.widht", "model.width"]),
        (["seed=one"], ["seed"]),
        (["trainer.accelerator=cpu", "trainer.devices=2"], ["torchrun"]),
        ("pool=median", ["list"]),
    ],
)
def test_a_wrong_override_is_a_usage_error_that_names_it(overrides, names, tmp_path, monkeypatch):
    from unet3d.errors import UsageError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        package.train(overrides)
    assert isinstance(caught.value, ValueError)
    assert all(name in str(caught.value) for name in names)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


SPACING = (1.0, 2.0, 1.5)


def write_masks(folder, **arrays):
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        image = nibabel.Nifti1Image(array.astype(np.uint8), np.diag([*SPACING, 1.0]))
        nibabel.save(image, folder / f"{name}.nii.gz")
    return folder


def make_box(label, *corner, size=(5, 4, 6)):
    array = np.zeros((20, 18, 16), np.uint8)
    array[tuple(slice(n, n + m) for n, m in zip(corner, size, strict=True))] = label
    return array


def score_naively(prediction, reference, tolerance_mm):
    """Return Dice, IoU, HD95 and surface Dice of two masks."""
    both, either = (prediction & reference).sum(), (prediction | reference).sum()
    surfaces = [mask & ~binary_erosion(mask) for mask in (prediction, reference)]
    distances = [
        distance_transform_edt(~surfaces[1 - n], sampling=SPACING)[surfaces[n]] for n in (0, 1)
    ]
    return {
        "dice": 2 * both / (prediction.sum() + reference.sum()),
        "iou": both / either,
        "hd95_mm": max(np.percentile(d, 95) for d in distances),
        "surface_dice": (np.concatenate(distances) <= tolerance_mm).mean(),
    }


def test_scores_are_those_of_a_naive_reference(tmp_path):
    first = np.maximum(make_box(1, 3, 3, 3), make_box(2, 12, 9, 7))
    second = np.maximum(make_box(1, 4, 3, 5, size=(7, 5, 6)), make_box(2, 12, 9, 7))
    predictions = write_masks(tmp_path / "predictions", a=first, b=second, c=second)
    references = write_masks(tmp_path / "references", a=second, b=first, c=second)
    names = ["background", "organ", "lesion"]
    result = package.evaluate(predictions, references, classes=names, tolerance_mm=1.0)
    for n, name in enumerate(names[1:], start=1):
        for key, value in score_naively(first == n, second == n, 1.0).items():
            for case in "ab":  # neither score depends on which mask is the prediction
                assert result.cases[case][name][key] == pytest.approx(value, abs=1e-9), (name, key)
        assert result.cases["c"][name]["dice"] == 1
        assert result.cases["c"][name]["hd95_mm"] == 0
    dice = [result.cases[case][name]["dice"] for case in "abc" for name in names[1:]]
    assert result.mean["dice"]["mean"] == pytest.approx(np.mean(dice))
    assert result.mean["dice"]["low"] <= result.mean["dice"]["mean"] <= result.mean["dice"]["high"]
    assert list(result.per_class) == names[1:]
    assert result.files == ()
    assert result.errors == {}


def test_absent_classes_ignored_voxels_and_regions_are_scored_as_documented(tmp_path):
    nothing, box = np.zeros((20, 18, 16), np.uint8), make_box(1, 3, 3, 3)
    predictions = write_masks(tmp_path / "predictions", a=nothing, b=nothing, c=box)
    references = write_masks(
        tmp_path / "references", a=nothing, b=box, c=np.maximum(box, make_box(3, 3, 9, 3))
    )
    cases = package.evaluate(
        predictions, references, classes=["background", "organ"], ignore_label=3
    ).cases
    assert np.isnan(cases["a"].get("organ", {}).get("dice", np.nan))
    assert cases["b"]["organ"]["dice"] == 0
    diagonal = np.linalg.norm(np.array([20, 18, 16]) * SPACING)
    assert cases["b"]["organ"]["hd95_mm"] == pytest.approx(diagonal, rel=0.1)
    assert cases["c"]["organ"]["dice"] == 1
    whole = package.evaluate(predictions, references, regions={"whole": [1, 3]}).cases
    assert whole["c"]["whole"]["dice"] == pytest.approx(2 / 3)


def test_a_missing_prediction_is_an_error_or_skipped_and_files_are_written(tmp_path):
    box = make_box(1, 3, 3, 3)
    predictions = write_masks(tmp_path / "predictions", a=box)
    references = write_masks(tmp_path / "references", a=box, b=box)
    missing = package.evaluate(predictions, references)
    assert (list(missing.cases), list(missing.errors)) == (["a"], ["b"])
    result = package.evaluate(
        predictions,
        references,
        missing_predictions="skip",
        metrics=["volume_error"],
        output=tmp_path / "out",
        draw_worst=0,
    )
    assert (list(result.cases), result.errors) == (["a"], {})
    assert result.cases["a"]["1"]["volume_error"] == 0
    names = {path.name for path in result.files}
    assert names >= {"evaluation.json", "evaluation.csv", "evaluation.png", "report.html"}
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written["cases"]["a"]["1"]["dice"] == 1
