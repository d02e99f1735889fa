"""docs/reference.md says what conf/ says, and names every verb and every file of a run."""

import importlib.util
import re
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path

import pytest

from unet3d.cli.app import iter_keys
from unet3d.cli.main import COMMANDS, main
from unet3d.config.compose import compose_config, get_config_dir

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "reference.py"


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "reference.md").read_text()


def test_the_page_is_what_the_script_makes(reference, page):
    assert page == reference.page(), "python scripts/reference.py"


def test_every_group_option_and_key_says_what_it_is(reference):
    assert reference.undescribed() == []


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_and_every_key_that_it_takes_has_its_place(page, verb):
    _, _, section = page.partition(f"### unet3d {verb}\n")
    section = section.split("\n### ")[0]
    assert section
    if (get_config_dir() / f"{verb}.yaml").exists():
        groups = [p.name for p in get_config_dir().iterdir() if p.is_dir()]
        keys = [
            k for k in iter_keys(compose_config([], verb).config) if k.split(".")[0] not in groups
        ]
        own = section if verb == "train" else section + page.partition("### unet3d train\n")[2]
        assert not [key for key in keys if f"| `{key}` |" not in own]


def test_every_option_of_every_group_has_its_keys(page):
    """As Hydra composes them, not as the script has read them; options of all groups at a time."""
    groups = [p for p in get_config_dir().iterdir() if p.is_dir() and p.name != "experiment"]
    options = [[f"{g.name}={p.stem}" for p in g.glob("[!_]*.yaml")] for g in groups]
    missing = []
    for words in map(list, zip_longest(*options)):
        words = [word for word in words if word is not None]
        config = compose_config(words, "train").config
        for group, _, option in (word.partition("=") for word in words):
            assert re.search(rf"\| \[?`{option}`", page), option
            keys = [
                f"{group}.{key}" for key in iter_keys(config[group]) if "_" not in (key[0], key[-1])
            ]
            missing += [key for key in keys if f"| `{key}` |" not in page]
    assert missing == []


def test_every_file_that_a_run_leaves_is_described(small, reference, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*small, "evaluation.enabled=true", "trainer.max_steps=2", "hydra.run.dir=run"]
    assert main(["train", *words, "save_every_seconds=0"]) == 0
    left = [str(p.relative_to("run")) for p in Path("run").rglob("*") if p.is_file()]
    patterns = next(iter(reference.FILES.values()))
    assert not [name for name in left if not any(fnmatch(name, p) for p in patterns)]
    rare = ("checkpoints/damaged.ckpt", "memory_snapshot.pickle")
    never = [p for p in patterns if p not in rare and not any(fnmatch(n, p) for n in left)]
    assert never == []
    readme = (ROOT / "README.md").read_text()
    heads = {name.partition("/")[0] for name in left if not name.startswith(".")}
    assert not [name for name in heads if f"`{name}" not in readme]
