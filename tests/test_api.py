"""Training and evaluation from Python: what the commands do, without prints and exit codes."""

import json
from pathlib import Path

import numpy as np
import pytest

import unet3d
from tests.contract.helpers.datasets import save
from unet3d.__main__ import main
from unet3d.errors import UsageError


@pytest.fixture
def predictions(tmp_path):
    """A folder of labels."""
    labels = np.random.default_rng(0).integers(0, 4, (12, 12, 12)).astype(np.uint8)
    return save(tmp_path / "predictions (1)" / "a.nii.gz", labels).parent


def test_a_missing_file_of_plans_or_folder_of_options_is_a_usage_error(small, tmp_path):
    with pytest.raises(UsageError, match="no file "):
        unet3d.train([*small, "experiment=none.json"])
    with pytest.raises(UsageError, match="config_dir: no folder "):
        unet3d.train(small, config_dir=tmp_path / "nothing")


def test_scores_are_those_of_the_command(predictions, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    words = [f"predictions={predictions}", f"references={predictions}", "classes=[air,a,b,c]"]
    assert main(["evaluate", *words, "metrics=lesions", "draw_worst=1", f"output={first}"]) == 0
    options = {"classes": ("air", "a", "b", "c"), "metrics": ["lesions"], "draw_worst": 1}
    result = unet3d.evaluate(predictions, predictions, output=second, **options)
    assert {path.name for path in result.files} == {path.name for path in first.iterdir()}
    written = [json.loads((folder / "evaluation.json").read_text()) for folder in (first, second)]
    assert written[0] == written[1]
    page = (second / "report.html").read_text()
    assert f"output={second}" in page
    assert "=null" not in page
    assert written[0]["cases"].keys() == result.cases.keys()


def test_an_evaluation_without_an_output_writes_nothing(predictions, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    result = unet3d.evaluate([predictions], predictions, regions={"any": (1, 2, 3)})
    assert list(result.per_class) == ["any"]
    assert result.files == ()
    assert list(tmp_path.iterdir()) == [predictions]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"references": Path("nowhere")}, "references: nowhere is neither a file nor a folder"),
        ({"metrics": ["medal"]}, "no option metrics=medal"),
        ({"tolerance_mm": {"a": -1}}, "tolerance_mm must be a distance in mm"),
    ],
)
def test_a_wrong_argument_of_evaluate_is_a_usage_error(predictions, options, message):
    with pytest.raises(UsageError, match=message):
        unet3d.evaluate(**{"predictions": predictions, "references": predictions} | options)
