"""`~` in a path is the home folder: on the command line, in YAML files and from Python."""

import os
from pathlib import Path

import pytest

import unet3d as package
from tests.data.helpers.datasets import write_decathlon, write_pairs
from unet3d.cli.main import main
from unet3d.config.compose import quote_override


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return a home folder with a space in its name, outside of the working folder."""
    home, work = tmp_path / "the home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", cache)  # of compiled kernels
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    yield home
    assert not Path("~").exists()


@pytest.mark.parametrize(
    ("typed", "override"),
    [
        ("hydra.run.dir=~/run", "hydra.run.dir='/home/me/run'"),
        ("recording=~/a.json", "recording=/home/me/a.json"),
        ("labels=[~/a,'~/b']", "labels=[/home/me/a,'/home/me/b']"),
        ("predictions=~/a,~/b", "predictions='/home/me/a,/home/me/b'"),
        ("output=a~/b", "output='a~/b'"),
        ("~data.root", "~data.root"),
    ],
)
def test_a_tilde_is_replaced_where_a_path_begins(monkeypatch, typed, override):
    monkeypatch.setenv("HOME", "/home/me")
    assert quote_override(typed, sweep=False) == override


def test_a_dataset_in_the_home_folder_is_found(home, capsys):
    write_decathlon(home / "scans", 3)
    assert main(["check", "data=decathlon", "data.root=~/scans", "output=~/found.txt"]) == 0
    assert (home / "found.txt").read_text().startswith("3 cases, no errors")
    Path("conf/data").mkdir(parents=True)
    Path("conf/data/mine.yaml").write_text("defaults: [decathlon, _self_]\nroot: ~/scans\n")
    assert main(["check", "data=mine", "read_voxels=false"]) == 0
    assert "3 cases" in capsys.readouterr().out


def test_a_run_in_the_home_folder_is_trained_predicted_evaluated_and_compared(home, small):
    write_pairs(home / "scans", 5)
    words = ["data=pairs", "data.num_classes=3", "data.root=~/scans", "data.cache=~/cache"]
    paths = ["~/scans/images/case_00.nii.gz", "~/scans/labels"]
    tiny = [word for word in small if not word.startswith("data.layout")]
    assert main(["train", *tiny, *words, "hydra.run.dir=~/run"]) == 0
    assert main(["predict", "checkpoint=~/run", f"input={paths[0]}", "output=~/predicted"]) == 0
    scored = ["predictions=~/predicted", f"references={paths[1]}", "output=~/scores"]
    package.load("~/run").predict_file(
        "~/scans/images/case_01.nii.gz", "~/predicted/case_01.nii.gz"
    )
    skip = "missing_predictions=skip"
    assert main(["evaluate", *scored, skip, "draw_worst=0"]) == 0
    result = package.evaluate(["~/predicted"], paths[1], missing_predictions="skip")
    assert sorted(result.cases) == ["case_00", "case_01"]
    assert main(["compare", "~/run", "report=~/comparison.html"]) == 0
    written = {"run", "predicted", "scores", "cache", "comparison.html"}
    assert written <= {path.name for path in home.iterdir()}
