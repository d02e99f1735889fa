"""docs/reference/ names every command, key and file of a run; most is generated from conf/."""

import inspect
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

import unet3d
from scripts.docs import generate_reference
from tests.docs.helpers.pages import ROOT
from unet3d.__main__ import main

pytestmark = pytest.mark.slow

FOLDER = ROOT / "docs" / "reference"


def test_the_pages_are_what_the_script_generates():
    for name, render in generate_reference.PAGES.items():
        text = (FOLDER / name).read_text()
        assert text == render(), "python -m scripts.docs.generate_reference"
    assert generate_reference.find_undescribed() == []


def test_every_public_name_is_described_with_arguments_that_it_has():
    text = (FOLDER / "api.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)(?:\((.*?)\))?` \|", text, re.MULTILINE))
    assert sorted(rows) == sorted(unet3d.__all__)
    for name, listed in rows.items():
        arguments = inspect.signature(getattr(unet3d, name)).parameters
        assert not {*re.findall(r"\w+", listed)} - {*arguments}


def test_every_file_of_a_run_is_described(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*small, "evaluation.enabled=true", "trainer.max_steps=2", "hydra.run.dir=run"]
    words += ["save_every_seconds=0", "logger=[tensorboard,csv]"]
    assert main(["train", *words]) == 0
    files = [str(p.relative_to("run")) for p in Path("run").rglob("*") if p.is_file()]
    section = (FOLDER / "files.md").read_text().partition("## Run folder\n")[2]
    patterns = re.findall(r"^\| `(\S+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert not [name for name in files if not any(fnmatch(name, p) for p in patterns)]
    rare = ("run.lock", "checkpoints/corrupted.ckpt", "memory_snapshot.pickle")
    never = [p for p in patterns if p not in rare and not any(fnmatch(n, p) for n in files)]
    assert never == []
    tutorial = (ROOT / "docs" / "tutorials" / "first-run.md").read_text()
    heads = {name.partition("/")[0] for name in files if not name.startswith((".", "csv/"))}
    assert not [name for name in heads if f"`{name}" not in tutorial]
