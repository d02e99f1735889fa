"""Only cases that neither trained nor chose a checkpoint are called held out."""

import json
import shutil

import pytest

import unet3d as api
from unet3d.__main__ import main
from unet3d.checkpoint_file import load_checkpoint, save_checkpoint


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """Train; return the run's folder, with predictions of its cases and of a new one beside it."""
    folder = tmp_path_factory.mktemp("held_out")
    words = [f"data.root={folder / 'data'}", f"hydra.run.dir={folder / 'run'}", "logger=none"]
    assert main(["train", *small, *words]) == 0
    (labels,) = (folder / "data").rglob("labelsTr")
    shutil.copytree(labels, folder / "predicted")
    (folder / "alone").mkdir()
    for copy in (folder / "predicted", folder / "alone"):
        shutil.copy(min(labels.iterdir()), copy / "new.nii.gz")
    return folder / "run"


def evaluate(predictions, output, *words):
    given = (f"predictions={predictions}", f"references={predictions}", f"output={output}")
    return main(["evaluate", *given, "draw_worst=0", *words])


def test_cases_of_the_run_and_held_out_ones_are_counted_and_listed(run, tmp_path, capsys):
    assert evaluate(run.parent / "predicted", tmp_path, f"checkpoint={run}") == 0
    assert "in the run: 4 training, 1 validation, 1 held out\n" in capsys.readouterr().out
    roles = json.loads((tmp_path / "evaluation.json").read_text())["roles"]
    assert (len(roles["training"]), roles["held out"]) == (4, ["new"])
    assert "4 training, 1 validation, 1 held out" in (tmp_path / "report.html").read_text()


def test_held_out_is_said_only_of_cases_that_no_checkpoint_has_seen(run, tmp_path, capsys):
    alone, page = run.parent / "alone", tmp_path / "report.html"
    assert evaluate(alone, tmp_path, f"checkpoint=[{run},{run}/checkpoints/last.ckpt]") == 0
    assert "in the run: held out\n" in capsys.readouterr().out
    assert ">held out<" in page.read_text()  # without an interval: it is one case
    assert evaluate(alone, tmp_path) == 0
    assert "held out" not in capsys.readouterr().out + page.read_text()
    assert api.evaluate(alone, alone, checkpoint=run).content["roles"]["held out"] == ["new"]


def test_a_checkpoint_that_does_not_list_its_cases_is_refused(run, tmp_path, capsys):
    content = load_checkpoint(run / "checkpoints" / "last.ckpt", mmap=False)
    del content["callbacks"]["ResumeState"]["fixed_settings"]["cases"]
    save_checkpoint(content, tmp_path / "other.ckpt")
    words = f"checkpoint={tmp_path / 'other.ckpt'}"
    assert evaluate(run.parent / "predicted", tmp_path / "out", words) == 2
    assert "it does not list the cases of its run: leave out checkpoint=" in capsys.readouterr().err
