"""`~` in a path is the home folder: on the command line, in YAML files and from Python."""

import os
from pathlib import Path

import pytest

import unet3d as package
from tests.data.helpers.datasets import write_decathlon
from unet3d.__main__ import main
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
        ("hydra.run.dir=~/my run", "hydra.run.dir='/home/me/my run'"),
        ("recording=~/a.json", "recording=/home/me/a.json"),
        ("labels=[~/a,'~/b']", "labels=[/home/me/a,'/home/me/b']"),
        ("predictions=~/a,~/b", "predictions='/home/me/a,/home/me/b'"),
        ("output=a~/b", "output='a~/b'"),
        ("~data.root", "~data.root"),
        ("resume='a b'", "resume='a b'"),
    ],
)
def test_a_tilde_is_replaced_where_a_path_begins_and_other_words_stay(monkeypatch, typed, override):
    monkeypatch.setenv("HOME", "/home/me")
    assert quote_override(typed, sweep=False) == override


def test_datasets_and_files_in_the_home_folder_are_found(home, capsys):
    write_decathlon(home / "scans", 3)
    assert main(["check", "data=decathlon", "data.root=~/scans", "output=~/found.txt"]) == 0
    assert (home / "found.txt").read_text().startswith("3 cases, no errors")
    Path("conf/data").mkdir(parents=True)
    Path("conf/data/mine.yaml").write_text("defaults: [decathlon, _self_]\nroot: ~/scans\n")
    assert main(["check", "data=mine", "read_voxels=false"]) == 0
    assert "3 cases" in capsys.readouterr().out
    result = package.evaluate(["~/scans/labelsTr"], "~/scans/labelsTr", output="~/scores")
    assert len(result.cases) == 3
    assert (home / "scores" / "evaluation.json").exists()
