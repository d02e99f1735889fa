"""Training and evaluation from Python: what the commands do, without prints and exit codes."""

import json
from pathlib import Path

import numpy as np
import pytest

import unet3d
from unet3d.__main__ import main
from unet3d.errors import UsageError

EVALUATED = ["evaluation.enabled=true", "trainer.num_sanity_val_steps=0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small):
    folder = tmp_path_factory.mktemp("runs") / "a run (1)"
    return unet3d.train([*small, *EVALUATED], folder=folder)


def test_a_missing_file_of_plans_or_folder_of_options_is_a_usage_error(small, tmp_path):
    with pytest.raises(UsageError, match="no file "):
        unet3d.train([*small, "experiment=none.json"])
    with pytest.raises(UsageError, match="config_dir: no folder "):
        unet3d.train(small, config_dir=tmp_path / "nothing")


def test_scores_are_those_of_the_command(trained, tmp_path, capsys):
    predictions = trained.folder / "validation"
    words = [f"predictions={predictions}", f"references={predictions}", "classes=[air,a,b,c]"]
    assert main(["evaluate", *words, "metrics=lesions", "draw_worst=1", f"output={tmp_path}"]) == 0
    result = unet3d.evaluate(
        predictions,
        predictions,
        classes=["air", "a", "b", "c"],
        metrics=["lesions"],
        output=tmp_path / "again",
        draw_worst=1,
    )
    names = sorted(path.name for path in result.files)
    assert names == sorted(path.name for path in tmp_path.iterdir() if path.name != "again")
    written = [
        json.loads((f / "evaluation.json").read_text()) for f in (tmp_path, tmp_path / "again")
    ]
    assert written[0] == written[1]
    page = (tmp_path / "again" / "report.html").read_text()
    assert "output=" + str(tmp_path / "again") in page
    assert "=null" not in page
    assert written[0]["cases"].keys() == result.cases.keys()
    np.testing.assert_equal(result.mean["dice"], result.content["mean"]["dice"])


def test_an_evaluation_without_an_output_writes_nothing(trained, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    predictions = trained.folder / "validation"
    result = unet3d.evaluate([predictions], predictions, regions={"any": (1, 2, 3)})
    assert list(result.per_class) == ["any"]
    assert result.files == ()
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"references": Path("nowhere")}, "references: nowhere is neither a file nor a folder"),
        ({"metrics": ["medal"]}, "no option metrics=medal"),
        ({"tolerance_mm": {"a": -1}}, "tolerance_mm must be a distance in mm"),
    ],
)
def test_a_wrong_argument_of_evaluate_is_a_usage_error(trained, options, message):
    folder = trained.folder / "validation"
    with pytest.raises(UsageError, match=message):
        unet3d.evaluate(**{"predictions": folder, "references": folder} | options)
