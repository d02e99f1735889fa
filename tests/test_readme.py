"""Every training command of the documents runs as written, with a limit and small volumes added."""

import re
import shlex
from pathlib import Path

import pytest

from unet3d.build.request import conf_folder
from unet3d.commands.main import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def blocks():
    """The commands of each block, in their order."""
    for document in DOCUMENTS:
        for block in re.findall(r"```bash\n(.*?)```", document.read_text(), re.DOTALL):
            found = []
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words[:2] == ["python", "train.py"]:
                    found.append(["train", *words[2:]])
                if words[:1] == ["unet3d"]:
                    found.append(words[1:])
            if found:
                yield found


def shortened(words, small):
    """With limits that let a command end in seconds; small volumes where it names none."""
    if words[0] == "fit":
        return [*words, "precisions=[bf16]", "patches=[1]"]  # else it takes a minute
    if words[0] == "plan":
        return [*words, "model.width=4"]
    if words[0] != "train":
        return words
    keys = {w.split("=")[0] for w in words}
    extra = [w for w in small if w.split("=")[0] not in keys]
    if "experiment=planned" in words:
        extra = [w for w in extra if not w.startswith("data.")]
        extra += ["trainer.max_epochs=null", "evaluation.enabled=true"]
    if "data=decathlon" in words:
        extra = [w for w in extra if ".source." not in w]
    if "model=unet_small" in words:
        extra += ["model.width=4"]  # the command itself takes a minute
    return [*words, *extra]


@pytest.mark.parametrize("block", list(blocks()), ids=lambda block: " ".join(block[0]))
def test_documented_commands_run_one_after_the_other(
    block, small, tmp_path, monkeypatch, decathlon_folder
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "Task04_Hippocampus").symlink_to(decathlon_folder)
    if "experiment=planned" in block[0]:  # as the block before has left it
        plan = ["plan", "data=decathlon", "budget_gib=8", "model.width=4"]
        assert main(plan) == 0
    for words in block:
        assert main(shortened(words, small)) == 0, " ".join(words)


def test_the_readme_names_every_option_and_file():
    text = (ROOT / "README.md").read_text()
    shown = {p.stem for p in conf_folder().glob("*/[!_]*.yaml")} - {"none", "tensorboard"}
    assert not [option for option in shown if f"`{option}`" not in text]
    rooms = [p.name for p in (ROOT / "unet3d").iterdir() if p.is_dir() and p.name[0] != "_"]
    assert not [room for room in rooms if f"unet3d/{room}/" not in text]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_are_there(document):
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text())
    local = [t for t in targets if "://" not in t]
    assert not [t for t in local if not (document.parent / t).exists()]


def test_the_tables_are_those_of_the_result_files():
    import importlib.util

    spec = importlib.util.spec_from_file_location("tables", ROOT / "scripts" / "readme_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for document in tables.documents():
        text = document.read_text()
        assert tables.filled(text) == text
