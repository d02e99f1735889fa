"""docs/reference/ names every command, key and file of a run; most is generated from conf/."""

import re
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path

import pytest

from scripts.docs import generate_reference
from unet3d.__main__ import main
from unet3d.config.compose import (
    compose_config,
    get_config_dir,
    list_config_groups,
    list_options,
)
from unet3d.config.keys import collect_values

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONF = get_config_dir()


@pytest.fixture(scope="module")
def options():
    return (ROOT / "docs" / "reference" / "options.md").read_text()


@pytest.mark.parametrize("name", generate_reference.PAGES)
def test_a_page_is_what_the_script_generates(name):
    text = (ROOT / "docs" / "reference" / name).read_text()
    generated = generate_reference.PAGES[name]()
    assert text == generated, "python -m scripts.docs.generate_reference"


def test_every_group_option_and_key_has_a_comment():
    assert generate_reference.find_undescribed() == []


def get_section(page: str, command: str) -> str:
    return page.partition(f"## unet3d {command}\n")[2].split("\n## ")[0]


def test_every_option_of_every_group_has_its_keys(options):
    """As Hydra composes them, not as the script reads them; options of all groups at a time."""
    groups = [group for group in list_config_groups() if group != "experiment"]
    choices = [[f"{group}={option}" for option in list_options(group)] for group in groups]
    missing = []
    for words in map(list, zip_longest(*choices)):
        words = [word for word in words if word is not None]
        config = compose_config(words, "train").config
        for group, _, option in (word.partition("=") for word in words):
            assert re.search(rf"\| \[?`{option}`", options), option
            keys = [
                f"{group}.{key}"
                for key in collect_values(config[group])
                if "_" not in (key[0], key[-1])
            ]
            missing += [key for key in keys if f"| `{key}` |" not in options]
    own = get_section((ROOT / "docs" / "reference" / "commands.md").read_text(), "train")
    assert not [key for key in missing if f"| `{key}` |" not in own]


def test_every_file_of_a_run_is_described(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*small, "evaluation.enabled=true", "trainer.max_steps=2", "hydra.run.dir=run"]
    words += ["save_every_seconds=0", "logger=[tensorboard,csv]"]
    assert main(["train", *words]) == 0
    files = [str(p.relative_to("run")) for p in Path("run").rglob("*") if p.is_file()]
    page = (ROOT / "docs" / "reference" / "files.md").read_text()
    section = page.partition("## Run folder\n")[2].partition("\n## ")[0]
    patterns = re.findall(r"^\| `(\S+)` \|", section, re.MULTILINE)
    assert not [name for name in files if not any(fnmatch(name, p) for p in patterns)]
    rare = ("run.lock", "checkpoints/corrupted.ckpt", "memory_snapshot.pickle")
    never = [p for p in patterns if p not in rare and not any(fnmatch(n, p) for n in files)]
    assert never == []
    tutorial = (ROOT / "docs" / "tutorials" / "first-run.md").read_text()
    heads = {name.partition("/")[0] for name in files if not name.startswith((".", "csv/"))}
    assert not [name for name in heads if f"`{name}" not in tutorial]
