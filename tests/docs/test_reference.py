"""docs/reference/ names every command, key and file of a run; most is generated from conf/."""

import re
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from scripts.docs import generate_reference
from tests.docs.helpers.pages import ROOT
from unet3d.__main__ import main
from unet3d.config.compose import compose_config, list_config_groups, list_options

pytestmark = pytest.mark.slow

FOLDER = ROOT / "docs" / "reference"


def test_the_pages_are_what_the_script_generates():
    for name, render in generate_reference.PAGES.items():
        text = (FOLDER / name).read_text()
        assert text == render(), "python -m scripts.docs.generate_reference"
    assert generate_reference.find_undescribed() == []


def iter_keys(values, prefix):
    """Yield the keys that have values, but not those of code or of other keys."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from iter_keys(value, f"{prefix}{key}.")
        elif key not in ("_target_", "_partial_") and not str(value).startswith("${"):
            yield f"{prefix}{key}"


def test_every_option_of_every_group_has_its_keys():
    """As Hydra composes them, not as the script reads them; options of all groups at a time."""
    options = (FOLDER / "options.md").read_text()
    commands = (FOLDER / "commands.md").read_text()
    described = options + commands.partition("## unet3d train\n")[2].partition("\n## ")[0]
    groups = [group for group in list_config_groups() if group != "experiment"]
    choices = [[f"{group}={option}" for option in list_options(group)] for group in groups]
    missing = []
    for words in map(list, zip_longest(*choices)):
        words = [word for word in words if word is not None]
        config = compose_config(words, "train").config
        for group, _, option in (word.partition("=") for word in words):
            assert re.search(rf"\| \[?`{option}`", options), option
            keys = iter_keys(OmegaConf.to_container(config[group]), f"{group}.")
            missing += [key for key in keys if f"| `{key}` |" not in described]
    assert missing == []


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
