"""Only cases that neither trained nor chose a checkpoint are called held out."""

import json
import shutil

import pytest

import unet3d as api
from unet3d.__main__ import main
from unet3d.checkpoint_file import load_checkpoint, save_checkpoint


@pytest.fixture
def predicted(unet3d, tmp_path):
    """Train; return a folder with perfect predictions of its cases, and of a new one."""
    assert unet3d(f"data.root={tmp_path / 'data'}", "logger=none") == 0
    (labels,) = (tmp_path / "data").rglob("labelsTr")
    shutil.copytree(labels, tmp_path / "predicted")
    shutil.copy(min(labels.iterdir()), tmp_path / "predicted" / "new.nii.gz")
    return tmp_path / "predicted"


def evaluate(predictions, *words, references=None):
    given = (f"predictions={predictions}", f"references={references or predictions}")
    return main(["evaluate", *given, "output=scores", "draw_worst=0", *words])


def test_cases_of_the_run_and_held_out_ones_are_counted_and_listed(predicted, tmp_path, capsys):
    assert evaluate(predicted, "checkpoint=run") == 0
    assert "in the run: 4 training, 1 validation, 1 held out\n" in capsys.readouterr().out
    roles = json.loads((tmp_path / "scores" / "evaluation.json").read_text())["roles"]
    assert roles["held out"] == ["new"]
    assert len(roles["training"]) == 4
    assert "4 training, 1 validation, 1 held out" in (tmp_path / "scores/report.html").read_text()


def test_held_out_is_said_only_of_cases_that_no_checkpoint_has_seen(predicted, tmp_path, capsys):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(predicted / "new.nii.gz", alone)
    assert evaluate(alone, "checkpoint=[run,run/checkpoints/last.ckpt]") == 0
    assert "in the run: held out\n" in capsys.readouterr().out
    assert "held out; 95%" not in (tmp_path / "scores" / "report.html").read_text()  # one case
    assert ">held out<" in (tmp_path / "scores" / "report.html").read_text()
    assert evaluate(alone) == 0
    assert "held out" not in capsys.readouterr().out
    assert "held out" not in (tmp_path / "scores" / "report.html").read_text()
    result = api.evaluate(alone, alone, checkpoint=tmp_path / "run")
    assert result.content["roles"]["held out"] == ["new"]


def test_a_checkpoint_that_does_not_list_its_cases_is_refused(predicted, tmp_path, capsys):
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    content = load_checkpoint(path, mmap=False)
    del content["callbacks"]["ResumeState"]["fixed_settings"]["cases"]
    save_checkpoint(content, path)
    assert evaluate(predicted, f"checkpoint={path}") == 2
    assert "it does not list the cases of its run: leave out checkpoint=" in capsys.readouterr().err
